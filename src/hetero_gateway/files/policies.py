"""Policies and predictors of installed packages, loaded on request."""

from importlib.metadata import EntryPoint
from typing import Any

from hetero_gateway.core.policies import Policy
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.scheduler_config import POLICY_GROUP, installed

_METHODS = ("choose", "would_choose", "turn", "take_back", "charge", "because")
_FLAGS = ("queues", "samples", "default_predictor")


def installed_policy(name: str, options: dict[str, Any]) -> Policy:
    """A new policy of an installed package.

    Args:
        name: of its entry point.
        options: its arguments (``scheduler.policy_options``).

    Raises:
        ConfigError: there is none of this name, it cannot be made, or is not a policy.
    """
    point = installed(POLICY_GROUP).get(name)
    if point is None:
        raise ConfigError(
            f"no package has installed a policy {name!r} (entry points {POLICY_GROUP})"
        )
    where = f"policy {name} ({point.value})"
    policy: Policy = made_by(point, options, where)
    lacks = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    lacks += [flag for flag in _FLAGS if not hasattr(policy, flag)]
    if lacks:
        raise ConfigError(f"{where} is no policy: it lacks {', '.join(lacks)}")
    policy.name = name
    return policy


def made_by(point: EntryPoint, options: dict[str, Any], where: str) -> Any:
    """The object that a package makes from its options. Raises ConfigError, however it fails."""
    try:
        return point.load()(dict(options))
    except Exception as error:
        raise ConfigError(f"{where} cannot be made: {type(error).__name__}: {error}") from error
