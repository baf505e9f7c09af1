"""Settings that are allowed but probably mistakes: they are served, with a warning.

``validate`` warns by the file alone, ``serve`` and ``status`` also by the instances' own
statements.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from hetero_gateway.core.model_names import same_model
from hetero_gateway.files.admin_key import is_loopback
from hetero_gateway.files.server_config import ServerConfig

_PORTS = {"http": 80, "https": 443}
# In one line of text.
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """The known properties of one instance.

    Args:
        models: the names that requests reach it by; empty: not known (yet).
        listed: the models that its engine lists; empty: not known (yet).
        profile_model: the model that its profile was made for; None: it has no profile.
        roots: source of its engine's weights, by its own statement: names or paths.
    """

    instance_id: str
    base_url: str
    models: frozenset[str]
    listed: frozenset[str] = frozenset()
    profile_model: str | None = None
    roots: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SetupWarning:
    """One line, and the instance and the key that it is about; None: none in particular."""

    text: str
    instance_id: str | None = None
    key: str | None = None

    def __str__(self) -> str:
        about = "" if self.instance_id is None else f"instance {self.instance_id}: "
        return about + self.text


def access_warnings(server: ServerConfig, *, named: bool) -> list[SetupWarning]:
    """Paths that clients' keys have locked, and no key opens.

    Args:
        named: clients have keys of their own, and so names.
    """
    if not named or server.admin_key_env is not None or server.admin_listen is not None:
        return []
    open_metrics = "server.expose.metrics: open shows clients' names to everybody"
    if is_loopback(server.host):
        if server.expose.metrics is not None:
            return []
        text = (
            "clients have names, so /metrics wants the key of /admin, and each start makes another "
            "one: for Prometheus, set server.admin_key_env to an environment variable with a key; "
            + open_metrics
        )
        return [SetupWarning(text)]
    locked = ["/admin (reloading over HTTP, usage, status)", "the dashboard's figures"]
    if server.expose.metrics in (None, "admin"):
        locked.insert(0, "/metrics")
    text = (
        f"closed to everybody (403): {', '.join(locked)}. To open them, set "
        "server.admin_key_env to an environment variable with a key, or server.admin_listen to a "
        "listener of their own"
    )
    return [SetupWarning(text)]


def setup_warnings(instances: Sequence[Seen]) -> list[SetupWarning]:
    """Problems of these instances, in order."""
    if not instances:
        return [SetupWarning("there are no instances: every request gets an error")]
    warnings = []
    first_at: dict[str, str] = {}
    for each in instances:
        first = first_at.setdefault(same_address(each.base_url), each.instance_id)
        if first != each.instance_id:
            text = f"it has the address of {first}: one server would be counted as two"
            warnings.append(SetupWarning(text, each.instance_id, "base_url"))
        warnings += _of_models(each)
    return warnings


def _of_models(each: Seen) -> Iterable[SetupWarning]:
    if each.listed and (missing := each.models - each.listed):
        text = f"its server does not list {_named(missing)}; it lists {_named(each.listed)}"
        yield SetupWarning(text, each.instance_id, "model")
    if each.profile_model is None:
        return
    served = each.listed or each.models
    # A served name may be an alias without meaning: then use the checkpoint's.
    for names in (served, each.roots):
        said = {same_model(each.profile_model, name) for name in names} - {None}
        if said:
            break
    if said == {False}:
        text = f"its profile is of {each.profile_model}, and it serves {_named(names)}"
        yield SetupWarning(text, each.instance_id, "profile")


def same_address(base_url: str) -> str:
    """A URL in its one canonical spelling."""
    parts = urlsplit(base_url)
    host = (parts.hostname or "").removesuffix(".")
    host = "127.0.0.1" if host in ("localhost", "::1") else host
    return f"{parts.scheme}://{host}:{parts.port or _PORTS[parts.scheme]}{parts.path.rstrip('/')}"


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
