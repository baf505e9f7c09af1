"""A running gateway's data: its instances, with the constants that their traffic shows, and the
last requests.

    /admin/instances      the instances, and the policy
    /admin/observations   of each: the gateway's profile of it, and rows to fit one to
    /admin/requests       lengths and times of the last requests

The gateway is only read; nothing in it changes.
"""

import csv
import dataclasses
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.instances.calibration import bounded
from hetero_gateway.errors import HeteroGatewayError, ProfileError
from hetero_gateway.files.profile_file import ProfileModel
from hetero_gateway.files.trace import TraceRequest, parse_trace
from hetero_gateway.files.yaml_file import parse_model
from hetero_gateway.lab.load.admin import fetch_csv, fetch_document
from hetero_gateway.lab.profiler.observed import fit_observed
from hetero_gateway.planner.present import Running

# A fit that misses held-out rows by more than this (median) is rejected, as in the gateway.
_MOST_ERROR = 0.3


@dataclass(frozen=True, slots=True)
class SeenGateway:
    """The gateway's data.

    Args:
        rows: the last requests; ``arrived_unix_s``: when they arrived, as far as it says.
        queued: requests that wait for an instance.
    """

    url: str
    policy: str
    running: tuple[Running, ...]
    rows: tuple[TraceRequest, ...]
    queued: int = 0
    arrived_unix_s: tuple[float, ...] = ()

    def of_models(self, names: Collection[str]) -> Self:
        """Without the requests of other models."""
        own = [not row.model or row.model in names for row in self.rows]
        return dataclasses.replace(
            self,
            rows=tuple(itertools.compress(self.rows, own)),
            arrived_unix_s=tuple(itertools.compress(self.arrived_unix_s, own)),
        )

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        arrivals = self._arrivals()
        return max(arrivals) - min(arrivals) if arrivals else 0.0

    @property
    def rate_per_s(self) -> float | None:
        """None if there are too few requests."""
        span_s = self.span_s
        return (len(self._arrivals()) - 1) / span_s if span_s > 0 else None

    def _arrivals(self) -> list[float]:
        return [row.arrival_s for row in self.rows if row.arrival_s is not None]


def ask(url: str, admin_key_env: str | None) -> SeenGateway:
    """Everything that the gateway reports.

    Raises:
        ConfigError: the URL or the key is wrong.
        HeteroGatewayError: the gateway does not answer, refuses, or is of another version.
    """
    try:
        document = fetch_document(url, admin_key_env, "/admin/instances", {})
        policy = str(document["policy"])
        running = tuple(_running(url, admin_key_env, row) for row in document["instances"])
        queued = int((document["queue"] or {}).get("waiting", 0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HeteroGatewayError(
            f"{url}: the answer cannot be read, it may be a gateway of another version: {error!r}"
        ) from error
    # None is no error.
    text = fetch_csv(url, admin_key_env, "/admin/requests")
    if len(text.splitlines()) < 2:
        return SeenGateway(url, policy, running, (), queued)
    rows = tuple(parse_trace(text, f"{url}/admin/requests"))
    return SeenGateway(url, policy, running, rows, queued, _arrived_unix_s(text))


def _arrived_unix_s(text: str) -> tuple[float, ...]:
    """Of each row; empty if not stated."""
    try:
        return tuple(float(row["arrival_unix_s"]) for row in csv.DictReader(text.splitlines()))
    except (KeyError, TypeError, ValueError):
        return ()


def _running(url: str, admin_key_env: str | None, row: Mapping[str, Any]) -> Running:
    left_out = "it is down" if not row["up"] else "it is draining" if row["draining"] else ""
    seen = fetch_document(url, admin_key_env, "/admin/observations", {"instance": row["id"]})
    described, profile, observed = seen["profile"], None, False
    if described is not None:
        profile = parse_model(ProfileModel, described, f"{url}: profile of {row['id']}").to_core()
        fitted = _fitted(seen, profile)
        observed = fitted is not None
        profile = fitted or profile
    return Running(
        id=str(row["id"]),
        host=urlsplit(str(row["base_url"])).hostname or "",
        profile=profile,
        kv_capacity_tokens=seen["kv_capacity_tokens"],
        observed=observed,
        left_out=left_out,
        models=tuple(map(str, row["models"])),
        in_flight=int(row["in_flight"]),
        draining=bool(row["draining"]),
        asleep=bool(row.get("asleep")),
        weight=float(row["weight"]),
        server="" if row.get("data_parallel_rank") is None else str(row["instance"]),
    )


def _fitted(seen: Mapping[str, Any], profile: Profile) -> Profile | None:
    """The profile fitted to the observations; None if they are too few, or fit badly."""
    try:
        fit = fit_observed(seen)
    except ProfileError:
        return None
    if fit.decode.median is None or fit.decode.median > _MOST_ERROR:
        return None
    errors = {"prefill": fit.prefill.median, "decode": fit.decode.median}
    source = {
        "how": "measured",
        "note": "observed by the gateway",
        "error": {name: value for name, value in errors.items() if value is not None},
    }
    constants = bounded(fit.constants, profile.constants)
    return dataclasses.replace(profile, constants=constants, source=source)
