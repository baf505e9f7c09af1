"""Request bodies and answers of /admin: instances, profiles and decisions as JSON."""

import dataclasses
import time
from typing import Any

import msgspec
from fastapi import Request, Response

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.instances.snapshot import InstanceSnapshot
from hetero_gateway.core.policies.base import Decision
from hetero_gateway.core.prefixes.caches import PrefixCaches
from hetero_gateway.core.types import Candidate
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.serve.wiring.gateway import Gateway

# finish-time's figures of a candidate besides those that every policy has.
_ESTIMATES = (
    "ttft_s", "latency_s", "delay_s", "memory_price_s", "late_price_s", "slo_price_s", "cost_s",
    "room",
)  # fmt: skip


MOST_BODY_BYTES = 2**20
NO_STORE = {"cache-control": "no-store"}


async def body_of(request: Request) -> bytes:
    """The body of a request to /admin. Raises Refusal: 413."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise Refusal(413, "request_too_large", f"at most {MOST_BODY_BYTES} bytes")
    return bytes(body)


def json_answer(document: dict[str, Any], status: int = 200) -> Response:
    # Not FastAPI's encoder: it walks the document in Python, which with hundreds of instances
    # delays streams.
    return Response(msgspec.json.encode(document), status, NO_STORE, "application/json")


def describe_decision(
    decision: Decision, caches: PrefixCaches | None = None
) -> list[dict[str, Any]]:
    """The candidates of a decision as JSON; figures that an excluded one never had are null.

    A policy that estimates (finish-time) adds its estimates; without any profile they are not
    times, and only the cost is included: sequences per weight. ``prefix``: how much of the
    prompt is believed to be cached there, if any instance has some; with the source, if ``caches``
    are those at the time of the decision.
    """
    estimates, missing = "room" in decision.choice.figures, dict.fromkeys(_ESTIMATES)
    return [
        {
            "instance": row.instance_id,
            "request_time_s": row.request_time_s,
            "kv_usage": row.kv_usage if row.excluded is None else None,
            "workload": row.workload,
            "load": row.load_s if row.excluded is None else None,
            "load_after": row.load_after_s,
            "in_flight": row.in_flight if row.excluded is None else None,
            "excluded": row.excluded,
        }
        | (missing | dict(row.estimates) | {"room": row.room} if estimates else {})
        | ({} if row.cached is None else {"prefix": _describe_cached(row, caches)})
        for row in decision.explain()
    ]


def _describe_cached(row: Candidate, caches: PrefixCaches | None) -> dict[str, Any]:
    assert row.cached is not None
    document = row.cached._asdict()
    if caches is not None and row.instance_id in caches.index:
        document["source"] = caches.source(row.instance_id).value
    return document


def _describe_prefixes(gateway: Gateway, instance: Instance) -> dict[str, Any]:
    """The gateway's index of an instance's prefix cache; null if there is no index."""
    caches = gateway.fleet.scheduler.caches
    used, room = (None, None) if caches is None else caches.index.bytes_on(instance.id)
    return {
        "prefix_trust": None if caches is None else caches.eta(instance.id),
        "prefix_bytes": used,
        "prefix_capacity_bytes": room,
        "prefix_source": None if caches is None else caches.source(instance.id).value,
    }


def refusals(gateway: Gateway, model: str) -> list[dict[str, Any]]:
    """The instances that serve a model when none of them can take a request."""
    figures = ("request_time_s", "kv_usage", "workload", "load", "load_after", "in_flight")
    rows = []
    for spec in list(gateway.fleet.scheduler.members.specs.values()):
        if model in spec.models:
            why = "the request does not fit"
            if spec.draining or not spec.available:
                why = "draining" if spec.draining else spec.absent_reason
            elif gateway.fleet.ejections[spec.instance_id].ejected:
                why = "ejected"
            rows.append({"instance": spec.instance_id, **dict.fromkeys(figures), "excluded": why})
    return rows


def describe_profile(profile: Profile) -> dict[str, Any]:
    """A profile as JSON, with the keys of a profile file."""
    source = dict(profile.source)
    if source.get("date") is not None:
        source["date"] = str(source["date"])
    return dataclasses.asdict(profile) | {"source": source}


def describe_instance(gateway: Gateway, instance: Instance) -> dict[str, Any]:
    """An instance as JSON; never its key."""
    profile = gateway.fleet.scheduler.members.specs[instance.id].profile
    seen = gateway.fleet.scheduler.members.snapshot(instance.id)
    return {
        "id": instance.id,
        "base_url": instance.config.base_url,
        "instance": instance.config.server,
        "data_parallel_rank": instance.config.rank_header,
        "models": sorted(instance.models),
        "profile": instance.profile_name,
        "recalibrated": instance.calibrated is not None,
        "profile_source": profile.source.get("how") if profile else None,
        "profile_age_s": instance.profile_age_s(),
        "drift": describe_drift(seen),
        "slowness": describe_slowness(seen),
        "max_model_len": instance.max_model_len,
        "weight": instance.weight,
        "leg": None if gateway.roles is None else gateway.roles.describe().get(instance.id),
        "refused_pairs": [
            {"to": decode, "for_s": for_s}
            for (prefill, decode), for_s in gateway.fleet.scheduler.legs.refused(
                time.monotonic()
            ).items()
            if prefill == instance.id
        ],
        "source": instance.source,
        "up": instance.up,
        "draining": instance.draining,
        "leaving": instance.leaving,
        "asleep": instance.asleep,
        "paused": instance.paused,
        "down_reason": None if instance.up else instance.shown_down_reason,
        **_describe_outcomes(instance),
        "scrape_problem": instance.scrape_problem or None,
        "in_flight": seen.in_flight,
        "workload": seen.load_s,
        "kv_tokens": seen.kv_tokens,
        "kv_capacity_tokens": seen.kv_capacity_tokens,
        "kv_usage": seen.kv_usage,
        "engine_kv_usage": instance.engine_kv_usage,
        "speed_factor": seen.speed_factor,
        "prefix_caching": instance.engine_prefix_caching,
        "cached_share": seen.hit_share,
        "cached_tokens": seen.cached_tokens,
        **_describe_prefixes(gateway, instance),
        "learnt_max_num_seqs": seen.learnt_max_num_seqs,
        "waiting_first_token": seen.waiting_first_token,
        "connections": gateway.connections_to(instance),
        "requests": gateway.metrics.decisions.get(instance.id, 0),
    }


def _describe_outcomes(instance: Instance) -> dict[str, Any]:
    """The outcomes of its requests, and the consequences; see core/instances/outcomes.py."""
    outcomes, now_s = instance.outcomes, time.monotonic()
    outcomes.ring.advance(now_s)
    ejected = outcomes.ejected
    return {
        "standing": outcomes.breaker.value,
        "ejected": ejected,
        "ejected_reason": outcomes.reason if ejected else None,
        "ejected_for_s": max(0.0, outcomes.until_s - now_s) if outcomes.shut else None,
        "recent_successes": outcomes.ring.good,
        "recent_failures": outcomes.ring.failed,
    }


def describe_drift(seen: InstanceSnapshot) -> dict[str, Any] | None:
    """How far observations are from the profile; None: there is no profile."""
    if not seen.profiled:
        return None
    told = seen.drift
    return {
        "decode": told.decode,
        "prefill": told.prefill,
        "spread": told.spread,
        "drifted": seen.drifted,
        "since": _unix_s(seen.drifted_since_s),
    }


def describe_slowness(seen: InstanceSnapshot) -> dict[str, Any] | None:
    """Its recent times compared with its profile; None: there is no profile."""
    if not seen.profiled:
        return None
    since_s = seen.slow_since_s
    return {"factor": seen.slowness, "slow": since_s is not None, "since": _unix_s(since_s)}


def _unix_s(monotonic_s: float | None) -> float | None:
    return None if monotonic_s is None else time.time() - (time.monotonic() - monotonic_s)
