"""``plan --from-gateway URL``: plan again with what a gateway has observed, and what that is worth.

    /admin/instances      which instances there are, and the policy
    /admin/observations   of each: the profile that the gateway has of it, and rows to fit one from
    /admin/requests       lengths and times of the last requests

The gateway is only asked; nothing in it changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hetero_gateway.cli.admin_client import (
    add_from_gateway,
    add_key_argument,
    fetch,
    fetch_csv,
    print_table,
    printable,
)
from hetero_gateway.errors import ConfigError, HeteroGatewayError, ProfileError

if TYPE_CHECKING:
    from hetero_gateway.core.costs.profile import Profile
    from hetero_gateway.deployment.present import Present, Running
    from hetero_gateway.files.plan_config import PlanRequest
    from hetero_gateway.files.trace import TraceRequest
    from hetero_gateway.planner.plan import Candidate, Figures, Layout, Plan

# Fewer requests say little of lengths and rates.
_FEW_REQUESTS = 100
# A fit that misses held-out rows by more than this (median) is not believed, as in the gateway.
_MOST_ERROR = 0.3
# Instances that are named in one line.
_NAMES = 6
# What stands for a trace's path in messages.
_TRACE = Path("requests that the gateway has seen")


@dataclass(frozen=True, slots=True)
class Seen:
    """What the gateway told."""

    url: str
    policy: str
    running: tuple[Running, ...]
    rows: tuple[TraceRequest, ...]

    def of_models(self, names: Collection[str]) -> Seen:
        """Without the requests of other models."""
        rows = tuple(row for row in self.rows if not row.model or row.model in names)
        return dataclasses.replace(self, rows=rows)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        arrivals = self._arrivals()
        return max(arrivals) - min(arrivals) if arrivals else 0.0

    @property
    def rate_per_s(self) -> float | None:
        """None where there are too few requests to tell."""
        span_s = self.span_s
        return (len(self._arrivals()) - 1) / span_s if span_s > 0 else None

    def _arrivals(self) -> list[float]:
        return [row.arrival_s for row in self.rows if row.arrival_s is not None]


@dataclass(frozen=True, slots=True)
class Again:
    """The question to plan with; ``now`` is what runs, simulated (None: nothing fits it)."""

    seen: Seen
    request: PlanRequest
    present: Present
    now: Candidate | None = None


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
    from hetero_gateway.deployment.present import (
        capacity_notes,
        observed_profiles,
        place,
        with_running_types,
    )
    from hetero_gateway.sim.alone import Mix

    seen = ask(args)
    own = _Asked(args, overrides, seen)
    first = own.request([], lengths=False)
    model = first.model
    present = place(seen.running, first.question.machines, model)
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

    def __init__(self, args: argparse.Namespace, overrides: Mapping[str, Any], seen: Seen) -> None:
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
        from hetero_gateway.files.plan_config import plan_request

        return plan_request(
            self._config,
            str(self._path),
            self._path.parent,
            rows=self._rows if lengths else None,
            trace=self._trace if lengths else None,
            measured=[*profiles, *self._profiles],
        )


def _notes(seen: Seen, own_trace: bool) -> list[str]:
    if own_trace:
        return []
    if not seen.rows:
        return ["the gateway has seen no request yet: lengths are those of the file"]
    if len(seen.rows) < _FEW_REQUESTS:
        return [f"the gateway has seen only {len(seen.rows)} requests: lengths are uncertain"]
    return []


def ask(args: argparse.Namespace) -> Seen:
    """Everything that the gateway tells. Raises as ``prepare``."""
    target = argparse.Namespace(url=args.from_gateway, admin_key_env=args.admin_key_env)
    try:
        document = fetch(target, "/admin/instances", {})
        policy = str(document["policy"])
        running = tuple(_running(target, row) for row in document["instances"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HeteroGatewayError(
            f"{args.from_gateway}: the answer cannot be read, it may be a gateway of another "
            f"version: {error!r}"
        ) from error
    return Seen(args.from_gateway, policy, running, tuple(_rows(target)))


def _rows(target: argparse.Namespace) -> list[TraceRequest]:
    """The last requests; none is no error."""
    from hetero_gateway.files.trace import parse_trace

    text = fetch_csv(target.url, target.admin_key_env, "/admin/requests")
    if len(text.splitlines()) < 2:
        return []
    return parse_trace(text, f"{target.url}/admin/requests")


def _running(target: argparse.Namespace, row: Mapping[str, Any]) -> Running:
    from hetero_gateway.deployment.present import Running
    from hetero_gateway.files.profile_file import ProfileModel
    from hetero_gateway.files.yaml_file import parse_model

    left_out = "it is down" if not row["up"] else "it is draining" if row["draining"] else ""
    seen = fetch(target, "/admin/observations", {"instance": row["id"]})
    described, profile, observed = seen["profile"], None, False
    if described is not None:
        profile = parse_model(
            ProfileModel, described, f"{target.url}: profile of {row['id']}"
        ).to_core()
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
    )


def _fitted(seen: Mapping[str, Any], profile: Profile) -> Profile | None:
    """The profile by what was observed; None where that is too little, or fits badly."""
    from hetero_gateway.core.instances.calibration import bounded
    from hetero_gateway.profiler.observed import fit_observed

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


def compared(plan: Plan, again: Again) -> tuple[Plan, Again]:
    """The plan with its best candidate changing as few machines as it can; and what runs now.

    What runs is simulated under the gateway's own policy, at the rate that the plan tells
    latencies for.
    """
    from hetero_gateway.deployment.present import aligned, simulate_present

    question, layouts = again.request.question, again.present.layouts
    best = aligned(plan.best, plan.machines, layouts)
    goals = dataclasses.replace(question.goals, rate_per_s=plan.rate_per_s or None)
    asked = dataclasses.replace(question, policy=again.seen.policy, goals=goals)
    now = simulate_present(asked, layouts)
    plan = dataclasses.replace(
        plan,
        candidates=(best, *plan.candidates[1:]),
        pareto=tuple(best if c == plan.best else c for c in plan.pareto),
    )
    return plan, dataclasses.replace(again, now=now)


def comparison(plan: Plan, again: Again) -> dict[str, Any]:
    """Now, proposed, and what the change is worth, as JSON."""
    best, now, present = plan.best, again.now, again.present
    changes = _changes(best.layouts, present.layouts)
    gain = _gain(best, now)
    return {
        "url": again.seen.url,
        "policy": again.seen.policy,
        "requests": len(again.seen.rows),
        "observed_s": again.seen.span_s,
        "rate_per_s": again.seen.rate_per_s,
        "instances": [
            {
                "id": p.instance.id,
                "machine": p.machine.id,
                "accelerator": p.machine.accelerator,
                "tensor_parallel": p.key[1],
                "times": p.profile.source.get("how", "not said"),
                "observed": p.instance.observed,
            }
            for p in present.placed
        ],
        "left_out": [{"id": name, "reason": reason} for name, reason in present.left_out],
        "now": _side(now, present.layouts),
        "proposed": _side(best, best.layouts),
        "changes": [
            {"machine": machine, "now": list(was), "proposed": list(becomes)}
            for machine, was, becomes in changes
        ],
        "throughput_gain": gain,
        "worth_it": _is_worth_it(plan, again),
    }


def _side(candidate: Candidate | None, layouts: Mapping[str, Layout]) -> dict[str, Any]:
    simulated = None if candidate is None else candidate.simulated
    at_rate = None if candidate is None else candidate.at_rate
    return {
        "layouts": {machine: list(layout) for machine, layout in layouts.items()},
        "throughput_tokens_per_s": None if simulated is None else simulated.tokens_per_s,
        "output_tokens_per_s": None if simulated is None else simulated.output_tokens_per_s,
        "at_rate": None if at_rate is None else _finite(at_rate),
        "usd_per_million_tokens": None if candidate is None else candidate.usd_per_million_tokens,
        "accelerators": sum(map(sum, layouts.values())),
    }


def _finite(figures: Figures) -> dict[str, float | None]:
    values: dict[str, float] = dataclasses.asdict(figures)
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _changes(
    proposed: Mapping[str, Layout], now: Mapping[str, Layout]
) -> list[tuple[str, Layout, Layout]]:
    return [(m, now[m], layout) for m, layout in proposed.items() if layout != now[m]]


def _gain(best: Candidate, now: Candidate | None) -> float | None:
    """Of throughput, relative; None where one side has none."""
    if now is None or now.simulated is None or best.simulated is None:
        return None
    return best.simulated.tokens_per_s / now.simulated.tokens_per_s - 1


def _is_worth_it(plan: Plan, again: Again) -> bool:
    """Whether the proposal is better at the goal by more than the simulator's noise."""
    from hetero_gateway.deployment.present import NOISE

    best, now = plan.best, again.now
    if not _changes(best.layouts, again.present.layouts):
        return False
    if now is None:
        return True
    if plan.goal == "cost" and best.usd_per_million_tokens and now.usd_per_million_tokens:
        return best.usd_per_million_tokens < now.usd_per_million_tokens * (1 - NOISE)
    if plan.goal == "fewest":
        return best.accelerators < now.accelerators or (best.holds is True and now.at_rate is None)
    return (_gain(best, now) or 0.0) > NOISE


def print_comparison(plan: Plan, again: Again) -> None:
    """The table, and a line on every instance that was left out."""
    from hetero_gateway.deployment.present import NOISE
    from hetero_gateway.planner.layouts import describe

    seen, present, best = again.seen, again.present, plan.best
    rate = "" if seen.rate_per_s is None else f", {seen.rate_per_s:.3g} requests/s"
    fitted = [p.instance.id for p in present.placed if p.instance.observed]
    more = f" and {len(fitted) - _NAMES} more" if len(fitted) > _NAMES else ""
    print(
        f"{printable(seen.url)}: instances on machines of the file: {len(present.placed)}; "
        f"requests: {len(seen.rows)} in {seen.span_s:.0f} s{rate}"
    )
    names = printable(", ".join(fitted[:_NAMES]) or "none")
    print(f"Times are by their own traffic of: {names}{more}.")
    print(f"Latencies are told for {plan.rate_per_s:.3g} requests/s.")
    print()
    rows = [_row(*line) for line in _lines(again.now, best)]
    print_table(("", "now", "proposed", "worth"), rows)
    print()
    if again.now is not None and again.now.at_rate is None and best.at_rate is not None:
        print(f"What runs does not hold {plan.rate_per_s:.3g} requests/s; the proposal does.")
    changes = _changes(best.layouts, present.layouts)
    for machine, was, becomes in changes:
        before = describe(was) if was else "unused"
        after = describe(becomes) if becomes else "unused"
        print(f"{printable(machine)}: {before} → {after}")
    if not changes:
        print("No change: what runs is the best that was found.")
    elif not _is_worth_it(plan, again):
        print(f"Not worth a change: within the {NOISE:.0%} that the simulator can be off by.")
    for name, reason in present.left_out:
        print(f"- {printable(name)} is left out: {printable(reason)}")


_Line = tuple[str, float | None, float | None, int]


def _lines(now: Candidate | None, best: Candidate) -> list[_Line]:
    """Name, now, proposed, digits after the point."""

    def full(candidate: Candidate | None, name: str) -> float | None:
        figures = None if candidate is None else candidate.simulated
        return None if figures is None else float(getattr(figures, name))

    def held(candidate: Candidate | None, name: str, factor: float = 1.0) -> float | None:
        figures = None if candidate is None else candidate.at_rate
        return None if figures is None else float(getattr(figures, name)) * factor

    lines: list[_Line] = [
        ("tokens/s, all at once", full(now, "tokens_per_s"), full(best, "tokens_per_s"), 0),
        (
            "of them output",
            full(now, "output_tokens_per_s"),
            full(best, "output_tokens_per_s"),
            0,
        ),
    ]
    for label, name, factor in (
        ("latency at the rate, s", "latency_mean_s", 1.0),
        ("latency p99, s", "latency_p99_s", 1.0),
        ("TTFT p99, s", "ttft_p99_s", 1.0),
        ("TPOT p99, ms", "tpot_p99_s", 1000.0),
    ):
        lines.append((label, held(now, name, factor), held(best, name, factor), 3))
    cost = None if now is None else now.usd_per_million_tokens
    if cost is not None or best.usd_per_million_tokens is not None:
        lines.append(("$ per million tokens", cost, best.usd_per_million_tokens, 3))
    accelerators = None if now is None else float(now.accelerators)
    lines.append(("accelerators", accelerators, float(best.accelerators), 0))
    return lines


def _row(name: str, now: float | None, best: float | None, digits: int) -> list[str]:
    def text(value: float | None) -> str:
        return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"

    worth = "-"
    if now and best is not None and math.isfinite(now) and math.isfinite(best):
        worth = f"{best / now - 1:+.1%}"
    return [name, text(now), text(best), worth]
