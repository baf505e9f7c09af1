"""``plan --from-gateway URL``: builds the planner's input from flags, a file and a gateway's data.

``profiler.seen`` asks the gateway, ``planner.present`` plans, and
``reports.plan_comparison`` prints.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.plan_config import load_plan_config
from hetero_gateway.files.plan_request import PlanRequest, plan_request
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.trace import read_trace
from hetero_gateway.lab.load.admin import printable
from hetero_gateway.lab.profiler.seen import SeenGateway, ask
from hetero_gateway.planner.present import (
    Present,
    capacity_notes,
    observed_profiles,
    place,
    with_running_types,
)
from hetero_gateway.sim.alone import Mix

# With fewer requests, lengths and rates are uncertain.
_FEW_REQUESTS = 100
# Replaces a trace's path in messages.
_TRACE = Path("requests that the gateway has seen")


@dataclass(frozen=True, slots=True)
class Replan:
    """What the gateway has seen, and the planning request."""

    seen: SeenGateway
    request: PlanRequest
    present: Present


def prepare(args: argparse.Namespace, overrides: Mapping[str, Any]) -> Replan:
    """Ask the gateway, and collect what to plan with.

    Raises:
        ConfigError: the URL, the key or the file is wrong, or no running instance is in the
            file.
        HeteroGatewayError: the gateway does not answer, or refuses.
    """
    seen = ask(args.from_gateway, args.admin_key_env)
    # With the file's distributions: enough to know model and machines.
    first = _asked(args, overrides, seen)([], rows=None, trace=None)
    model = first.model
    present = place(seen.running, first.question.machines, model, accelerator)
    if not present.placed:
        reasons = "; ".join(f"{name}: {why}" for name, why in present.left_out) or "it has none"
        raise ConfigError(
            f"{args.config}: none of the gateway's instances is on a machine of the file: "
            f"{printable(reasons)}"
        )
    seen = seen.of_models({m for p in present.placed for m in p.instance.models})
    asked = _asked(args, overrides, seen)
    believed = asked([]).question
    mix = Mix.of(believed.lengths, believed.seed)
    profiles = observed_profiles(present, believed.types, model, mix.mean_prompt, mix.mean_output)
    request = asked(profiles)
    notes = (
        *request.question.notes,
        *_notes(seen, args.requests is not None),
        *capacity_notes(present, request.question.types),
    )
    question = with_running_types(request.question, present, model)
    question = dataclasses.replace(question, notes=tuple(printable(note) for note in notes))
    return Replan(seen, dataclasses.replace(request, question=question), present)


def _asked(
    args: argparse.Namespace, overrides: Mapping[str, Any], seen: SeenGateway
) -> Callable[..., PlanRequest]:
    """Builds the planning request from further profiles, which take precedence, and the file.

    Flags override what the gateway saw, which overrides the file's own values.
    """
    wanted = dict(overrides)
    for key, value in (("policy", seen.policy), ("workload.rate_per_s", seen.rate_per_s)):
        if wanted.get(key) is None:
            wanted[key] = value
    path, base_dir = args.config, args.config.parent
    config = load_plan_config(path, wanted)
    profiles = [load_profile(name) for name in args.profile]
    profiles += [load_profile(name, base_dir) for name in config.profiles]
    trace: Path | None = args.requests
    if trace is None and not seen.rows and config.workload.requests is not None:
        trace = base_dir / config.workload.requests
    rows = seen.rows or None if trace is None else read_trace(trace)
    trace = trace or (_TRACE if rows else None)

    def request(measured: Sequence[Profile], **lengths: Any) -> PlanRequest:
        what = {"rows": rows, "trace": trace, "measured": [*measured, *profiles]} | lengths
        return plan_request(config, str(path), base_dir, **what)

    return request


def _notes(seen: SeenGateway, own_trace: bool) -> list[str]:
    if own_trace:
        return []
    if not seen.rows:
        return ["the gateway has seen no request yet: lengths are those of the file"]
    if len(seen.rows) < _FEW_REQUESTS:
        return [f"the gateway has seen only {len(seen.rows)} requests: lengths are uncertain"]
    return []
