"""The models that clients can ask for, as /v1/models lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hetero_gateway.engines.vllm import ModelCard
from hetero_gateway.gateway.admission.clients import Admission, Client
from hetero_gateway.gateway.dataplane.application import DataPlane


class InstanceListing(Protocol):
    """Knows the instances: a ``Fleet``, or ``Members`` of a worker."""

    def ready(self) -> bool:
        """Whether any instance can take requests."""

    def models(self) -> Mapping[str, ModelCard]:
        """Names that live instances serve, each with a card."""


class Serving(Protocol):
    """Serves models: a ``Gateway``, or a ``Worker``."""

    admission: Admission
    dataplane: DataPlane

    @property
    def listing(self) -> InstanceListing: ...


def model_list(gateway: Serving, client: Client) -> dict[str, Any]:
    """The answer of /v1/models: the models that the client may use."""
    wanted = client.models
    served = served_models(gateway).items()
    cards = [model_card(*m) for m in served if wanted is None or m[0] in wanted]
    return {"object": "list", "data": cards}


def served_models(gateway: Serving) -> dict[str, ModelCard]:
    """The models of live instances, and names that stand for any of them."""
    served = dict(gateway.listing.models())
    for name, model in list(gateway.dataplane.intake.routes.aliases(served.__contains__)):
        card = served[model]
        served.setdefault(name, card._replace(owned_by=None, root=card.root or model))
    return served


def model_card(model: str, card: ModelCard) -> dict[str, Any]:
    """As its engine shows it, so that a base and its adapters can be distinguished."""
    return {
        "id": model,
        "object": "model",
        "created": card.created or 0,
        "owned_by": card.owned_by or "hetero-gateway",
        "root": card.root or model,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
        "permission": card.permission,
    }
