"""``simulate URL``: the running cluster, as its gateway knows it."""

import argparse
import dataclasses
import sys
from collections.abc import Iterable

from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.cluster_config import Cluster, WorkloadConfig
from hetero_gateway.files.trace import TraceRequest
from hetero_gateway.lab.load.admin import printable
from hetero_gateway.lab.profiler.seen import ask
from hetero_gateway.planner.present import Running
from hetero_gateway.sim.cluster import SimulatedInstance

# With fewer requests, lengths and rates are uncertain.
_FEW_REQUESTS = 100


def running_cluster(args: argparse.Namespace) -> tuple[Cluster, list[TraceRequest]]:
    """The instances of ``args.url`` that take requests, and the last requests of their model.

    An instance gets the profile that fits its traffic, or the gateway's profile of it if too
    little was seen, and the KV cache that its engine reports. What is left out, and how little
    was seen, is reported on standard error.

    Raises:
        ConfigError: the URL or the key is wrong; no instance takes requests, one has no
            profile, or they serve several models and ``args.model`` names none.
        HeteroGatewayError: the gateway does not answer, or refuses.
    """
    seen = ask(args.url, args.admin_key_env)
    there = [i for i in seen.running if not i.left_out and not i.asleep]
    for i in seen.running:
        if i not in there:
            _note(f"{i.id} is left out: {i.left_out or 'it sleeps'}")
    instances = _of_one_model(args, there)
    if without := [i.id for i in instances if i.profile is None]:
        raise ConfigError(
            f"{args.url}: a simulation needs the profile of each instance; give one in the "
            f"gateway's file to {printable(', '.join(without))}: a built-in one (`hetero-gateway "
            "profile list`), or one made from its traffic (`hetero-gateway profile --from-gateway "
            "URL`)"
        )
    models = {m for i in instances for m in i.models} if args.model is None else {args.model}
    rows = list(seen.of_models(models).rows)
    if len(rows) < _FEW_REQUESTS and args.requests is None:
        lengths = "their lengths say little" if rows else "lengths are those of a chat mix"
        _note(f"the gateway has seen {len(rows)} requests: {lengths}")
    return Cluster(tuple(_simulated(instances)), (), WorkloadConfig(), None), rows


def _of_one_model(args: argparse.Namespace, there: list[Running]) -> list[Running]:
    """Those that serve ``args.model``, or all if they share a name."""
    names = sorted({name for i in there for name in i.models})
    if args.model is not None:
        there = [i for i in there if args.model in i.models]
    if not there:
        whose = "" if args.model is None else f" of model {args.model}"
        served = f"; there are {printable(', '.join(names))}" if names else ""
        raise ConfigError(f"{args.url}: no instance{whose} takes requests now{served}")
    if not set.intersection(*(set(i.models) for i in there)):
        raise ConfigError(
            f"{args.url}: a simulation is of one model, and its instances serve several: name one, "
            f"--model {printable('|'.join(names))}"
        )
    return there


def _simulated(instances: Iterable[Running]) -> Iterable[SimulatedInstance]:
    for i in instances:
        assert i.profile is not None
        capacity = i.kv_capacity_tokens or i.profile.kv_capacity_tokens
        profile = dataclasses.replace(i.profile, kv_capacity_tokens=capacity)
        yield SimulatedInstance(InstanceId(i.id), profile, profile, i.weight)


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr)
