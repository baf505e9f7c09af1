"""``simulate --against RECORD``: a gateway's record compared with a simulation of it."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hetero_gateway.cli.reports import recorded
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.cluster_config import load_cluster
from hetero_gateway.files.recorded_run import RecordedRun, RequestLine, read_recorded_run
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.recorded import Placements, Recording, replay


def run(args: argparse.Namespace) -> int:
    """Compare each record with its simulation."""
    for flag in ("rate", "load", "requests", "arrivals", "count", "report"):
        if getattr(args, flag):
            raise ConfigError(f"--against takes no --{flag}: a record has its own requests")
    # By id: the true instances, if a cluster file describes them.
    known = () if args.config is None else load_cluster(args.config).instances
    profiles = {str(instance.instance_id): instance.profile for instance in known}
    compared = [_compare(args, path, read_recorded_run(path), profiles) for path in args.against]
    if args.json:
        print(json.dumps([recorded.document(each) for each in compared]))
    else:
        for each in compared:
            recorded.print_comparison(each)
    return 0


def _compare(
    args: argparse.Namespace, path: Path, record: RecordedRun, profiles: Mapping[str, Profile]
) -> recorded.RecordComparison:
    answered = [line for line in record.requests if line.instance and line.out and line.end]
    if not answered:
        raise ConfigError(f"{path}: none of its requests was answered with tokens")
    policies: tuple[str, ...] = args.policy or (record.policy,)
    notes = _notes(record, answered)
    if len({line.model for line in answered}) > 1:
        policies = ()
        notes.append("Requests are for several models: they are simulated as placed alone.")
    instances = _instances(path, record, profiles)
    for instance in instances:
        if args.scheduling == "chunked" and instance.profile.max_num_seqs > args.max_batched_tokens:
            raise ConfigError(
                f"{path}: {instance.instance_id} runs up to {instance.profile.max_num_seqs} "
                "sequences, more than the tokens of a step; raise --max-batched-tokens"
            )
    recording = _recording(answered, [str(i.instance_id) for i in instances])
    replayed = replay(recording, instances, policies, args.scheduling, args.max_batched_tokens)
    ids = tuple(str(i.instance_id) for i in instances)
    return recorded.RecordComparison(path, record.policy, ids, replayed, tuple(notes))


def _instances(
    path: Path, record: RecordedRun, profiles: Mapping[str, Profile]
) -> list[SimulatedInstance]:
    found = []
    for name, instance in record.instances.items():
        profile = profiles.get(name) or instance.profile
        if profile is None:
            raise ConfigError(
                f"{path}: the gateway had no profile for {name}; describe it in a cluster file "
                "under this id: -c CLUSTER.yaml"
            )
        found.append(
            SimulatedInstance(InstanceId(name), profile, instance.profile, instance.weight)
        )
    return found


def _notes(record: RecordedRun, answered: Sequence[RequestLine]) -> list[str]:
    notes = []
    without = len(record.requests) - len(answered)
    if without:
        notes.append(f"{without} requests without an answer in tokens are left out.")
    if record.left_out:
        notes.append(f"The gateway itself left out {record.left_out} requests.")
    several = sum(line.n > 1 for line in answered)
    if several:
        notes.append(
            f"{several} requests of several sequences are simulated as that many requests."
        )
    cached = sum(line.cached for line in answered) / sum(line.prompt * line.n for line in answered)
    if cached >= 0.01:
        notes.append(
            f"{cached:.0%} of the prompts were in prefix caches, which the simulated engines lack."
        )
    return notes


def recording_of(record: RecordedRun) -> Recording:
    """The requests of a record that were answered with tokens, and its instances in order."""
    answered = [line for line in record.requests if line.instance and line.out and line.end]
    return _recording(answered, list(record.instances))


def _recording(answered: Sequence[RequestLine], ids: Sequence[str]) -> Recording:
    """As arrays: each sequence counts as one request."""
    position = {name: i for i, name in enumerate(ids)}
    lines = [line for line in answered for _ in range(line.n)]

    def floats(name: str, instead: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        values = [getattr(line, name) for line in lines]
        others = [getattr(line, instead) for line in lines]
        return np.array([o if v is None else v for v, o in zip(values, others, strict=True)], float)

    return Recording(
        Placements(
            np.array([position[line.instance] for line in lines], np.int64),
            floats("placed", "at"),
            np.array([max(1, line.prompt) for line in lines], np.int64),
            np.array([max(1, round(line.out / line.n)) for line in lines], np.int64),
        ),
        floats("at", "at"),
        floats("predicted", "predicted"),
        floats("first", "end"),
        floats("end", "end"),
        np.array([line.stream for line in lines], bool),
    )
