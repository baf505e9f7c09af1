"""Which instances are places of one server: those of its data-parallel ranks."""

from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet.instances import Fleet, Instance


def places_of(fleet: Fleet, instance: Instance) -> list[Instance]:
    """All places behind an instance's address: itself, or one for each rank."""
    if instance.config.data_parallel_rank is None:
        return [instance]
    url = instance.config.base_url
    return [each for each in _places(fleet) if each.config.base_url == url]


def places_named(fleet: Fleet, name: str) -> list[Instance]:
    """The instance of this id, or the places of the server with this name; none: unknown."""
    instance = fleet.instances.get(InstanceId(name))
    if instance is not None:
        return [instance]
    return [each for each in _places(fleet) if each.config.server == name]


def servers(fleet: Fleet) -> list[Instance]:
    """One instance of each server: the first of its places."""
    return [each for each in fleet.instances.values() if places_of(fleet, each)[:1] == [each]]


def _places(fleet: Fleet) -> list[Instance]:
    instances = fleet.instances.values()
    return [each for each in instances if each.config.data_parallel_rank is not None]
