"""``plan --from-gateway URL``: from the flags, a file and what a gateway has seen to the question.

``profiler.seen`` asks the gateway, ``planner.present`` plans, and
``reports.plan_comparison`` prints.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_gateway.cli.admin_client import add_from_gateway, add_key_argument
from hetero_gateway.errors import ConfigError

if TYPE_CHECKING:
    from hetero_gateway.core.costs.profile import Profile
    from hetero_gateway.files.plan_request import PlanRequest
    from hetero_gateway.files.trace import TraceRequest
    from hetero_gateway.lab.profiler.seen import SeenGateway
    from hetero_gateway.planner.present import Present

# Fewer requests say little of lengths and rates.
_FEW_REQUESTS = 100
# What stands for a trace's path in messages.
_TRACE = Path("requests that the gateway has seen")


@dataclass(frozen=True, slots=True)
class Again:
    """What the gateway has seen, and the question to plan with."""

    seen: SeenGateway
    request: PlanRequest
    present: Present


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_from_gateway(
        parser,
        "plan again with the profiles, lengths and rate that this gateway has observed, and say "
        "what a change would be worth",
    )
    add_key_argument(parser)


def prepare(args: argparse.Namespace, overrides: Mapping[str, Any]) -> Again:
    """Ask the gateway, and put together what to plan with.

    Raises:
        ConfigError: the URL, the key or the file is wrong, or nothing that runs is in the file.
        HeteroGatewayError: the gateway does not answer, or refuses.
    """
    from hetero_gateway.files.accelerator_catalogue import accelerator
    from hetero_gateway.lab.load.admin import printable
    from hetero_gateway.lab.profiler.seen import ask
    from hetero_gateway.planner.present import (
        capacity_notes,
        observed_profiles,
        place,
        with_running_types,
    )
    from hetero_gateway.sim.alone import Mix

    seen = ask(args.from_gateway, args.admin_key_env)
    own = _Asked(args, overrides, seen)
    first = own.request([], lengths=False)
    model = first.model
    present = place(seen.running, first.question.machines, model, accelerator)
    if not present.placed:
        reasons = "; ".join(f"{name}: {why}" for name, why in present.left_out) or "it has none"
        raise ConfigError(
            f"{args.config}: none of the gateway's instances is on a machine of the file: "
            f"{printable(reasons)}"
        )
    seen = seen.of_models({m for p in present.placed for m in p.instance.models})
    asked = _Asked(args, overrides, seen)
    believed = asked.request([]).question
    mix = Mix.of(believed.lengths, believed.seed)
    profiles = observed_profiles(present, believed.types, model, mix.mean_prompt, mix.mean_output)
    request = asked.request(profiles)
    notes = (
        *request.question.notes,
        *_notes(seen, args.requests is not None),
        *capacity_notes(present, request.question.types),
    )
    question = with_running_types(request.question, present, model)
    question = dataclasses.replace(question, notes=tuple(printable(note) for note in notes))
    return Again(seen, dataclasses.replace(request, question=question), present)


class _Asked:
    """The file, with flags over what the gateway saw, and that over what the file says."""

    def __init__(
        self, args: argparse.Namespace, overrides: Mapping[str, Any], seen: SeenGateway
    ) -> None:
        from hetero_gateway.files.plan_config import load_plan_config
        from hetero_gateway.files.profile_file import load_profile
        from hetero_gateway.files.trace import read_trace

        wanted = dict(overrides)
        for key, value in (("policy", seen.policy), ("workload.rate_per_s", seen.rate_per_s)):
            if wanted.get(key) is None:
                wanted[key] = value
        self._path: Path = args.config
        base_dir = self._path.parent
        self._config = load_plan_config(self._path, wanted)
        self._profiles = [load_profile(name) for name in args.profile]
        self._profiles += [load_profile(name, base_dir) for name in self._config.profiles]
        file_trace = self._config.workload.requests
        self._trace: Path | None = None
        self._rows: Sequence[TraceRequest] | None = None
        if args.requests is not None or (not seen.rows and file_trace is not None):
            self._trace = args.requests or base_dir / str(file_trace)
            self._rows = read_trace(self._trace)
        elif seen.rows:
            self._trace, self._rows = _TRACE, seen.rows

    def request(self, profiles: Sequence[Profile], *, lengths: bool = True) -> PlanRequest:
        """What the planner is asked; ``profiles`` come first. Without ``lengths``, by the file's
        distributions: enough to know model and machines."""
        from hetero_gateway.files.plan_request import plan_request

        return plan_request(
            self._config,
            str(self._path),
            self._path.parent,
            rows=self._rows if lengths else None,
            trace=self._trace if lengths else None,
            measured=[*profiles, *self._profiles],
        )


def _notes(seen: SeenGateway, own_trace: bool) -> list[str]:
    if own_trace:
        return []
    if not seen.rows:
        return ["the gateway has seen no request yet: lengths are those of the file"]
    if len(seen.rows) < _FEW_REQUESTS:
        return [f"the gateway has seen only {len(seen.rows)} requests: lengths are uncertain"]
    return []
