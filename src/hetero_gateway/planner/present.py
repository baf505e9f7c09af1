"""What runs behind a gateway now, its capacity, and whether a change is worth it.

The comparison with a new plan avoids two biases. The gateway knows the times of running instances,
not those of another tensor parallelism on the same accelerator: these are scaled by the same
deviation from the believed times, or untried sizes would look better on every slow machine. And
both deployments are simulated with the same profiles and requests.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero_gateway.core.costs.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.nearest import folded
from hetero_gateway.errors import ConfigError
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.goals import HEADROOM, usd_per_million_tokens
from hetero_gateway.planner.layouts import group_machines, machine_names
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.plan import (
    InstanceType,
    Key,
    Layout,
    Machine,
    MemoryEstimate,
    Plan,
    PlanCandidate,
)
from hetero_gateway.planner.question import Question, reduced
from hetero_gateway.sim.alone import Alone, Mix

# A smaller gain is the simulator's noise: one in twenty choices is off by up to this much.
NOISE = 0.02
# An engine whose KV cache differs by more from the modelled one has other settings.
_KV_APART = 0.1
# Time ratios within this are 1, with rounding.
_SAME = 1e-6


@dataclass(frozen=True, slots=True)
class Running:
    """One instance as its gateway knows it.

    Args:
        host: of its base_url.
        profile: the gateway's profile of it; None: it has none.
        kv_capacity_tokens: as the engine itself reports; None: it does not.
        observed: whether the profile's constants were fitted to its traffic.
        left_out: why it does not count, for example that it is down; empty: it does.
        models: names that clients ask for.
        in_flight: its open requests; ``draining``, ``asleep``: why it gets none.
        weight: as ``InstanceSpec``.
        server: whose place it is, where a server's data-parallel ranks are each one; empty: none.
    """

    id: str
    host: str
    profile: Profile | None
    kv_capacity_tokens: int | None = None
    observed: bool = False
    left_out: str = ""
    models: tuple[str, ...] = ()
    in_flight: int = 0
    draining: bool = False
    asleep: bool = False
    weight: float = 1.0
    server: str = ""


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """An instance on a machine of the plan."""

    instance: Running
    machine: Machine
    profile: Profile

    @property
    def key(self) -> Key:
        return self.machine.accelerator, self.profile.tensor_parallel


@dataclass(frozen=True, slots=True)
class Present:
    """Layouts by machine id, as of a candidate; ``left_out`` has ids with reasons."""

    layouts: Mapping[str, Layout]
    placed: tuple[PlacedInstance, ...]
    left_out: tuple[tuple[str, str], ...]


def place(
    running: Sequence[Running],
    machines: Sequence[Machine],
    model: ModelShape,
    find: Callable[[str], Accelerator],
) -> Present:
    """Assign every instance to a machine, largest first; ``find``: its accelerator, or raises."""
    names = machine_names([machine.id for machine in machines])
    room = {machine.id: machine.count for machine in machines}
    placed: list[PlacedInstance] = []
    left_out: list[tuple[str, str]] = []

    def machine_of(instance: Running) -> Machine | str:
        """Where it runs, or why that is unknown."""
        profile = instance.profile
        if instance.left_out:
            return instance.left_out
        if profile is None:
            return "it has no profile, so its accelerator is not known"
        if folded(profile.model) != folded(model.name):
            return f"its profile is of {profile.model}, the plan is for {model.name}"
        try:
            name = find(profile.gpu).name
        except ConfigError:
            return f"its accelerator {profile.gpu} is not in the catalogue"
        fitting = [machine for machine in machines if machine.accelerator == name]
        if not fitting:
            return f"the file has no machine with {name}"
        t = profile.tensor_parallel
        free = [machine for machine in fitting if room[machine.id] >= t]
        if not free:
            return f"the file's machines with {name} have no room for {t} more"
        named = (
            machine
            for machine in free
            if instance.id.startswith(f"{names[machine.id]}-tp")
            or instance.host in (machine.id, names[machine.id])
        )
        return next(named, free[0])

    size = {r.id: r.profile.tensor_parallel if r.profile else 0 for r in running}
    for instance in sorted(running, key=lambda r: -size[r.id]):
        found = machine_of(instance)
        if isinstance(found, str):
            left_out.append((instance.id, found))
            continue
        assert instance.profile is not None
        room[found.id] -= instance.profile.tensor_parallel
        placed.append(PlacedInstance(instance, found, instance.profile))
    layouts = {
        machine.id: tuple(
            sorted((p.key[1] for p in placed if p.machine.id == machine.id), reverse=True)
        )
        for machine in machines
    }
    return Present(layouts, tuple(placed), tuple(left_out))


def observed_profiles(
    present: Present,
    types: Mapping[Key, InstanceType],
    model: ModelShape,
    mean_prompt: float,
    mean_output: float,
) -> list[Profile]:
    """Profiles for the planner, from running instances.

    Args:
        types: as the planner has them without a gateway.
        mean_prompt, mean_output: lengths at which observed and believed times are compared.

    Returns:
        For each running type, the mean of its instances' constants; and for each other type on
        the same accelerator the believed one, scaled by the same deviation.
    """
    groups: dict[Key, list[PlacedInstance]] = {}
    for each in present.placed:
        groups.setdefault(each.key, []).append(each)
    found: list[Profile] = []
    ratios: dict[str, list[tuple[float, float]]] = {}
    for key, members in groups.items():
        profile = _mean_profile(key, members, model)
        found.append(profile)
        if key in types:
            believed = types[key].profile
            ratio = _ratio(profile, believed, mean_prompt, mean_output)
            ratios.setdefault(key[0], []).append(ratio)
    for (name, t), believed_type in types.items():
        if name in ratios and (name, t) not in groups:
            prefill = _geometric_mean([p for p, _ in ratios[name]])
            decode = _geometric_mean([d for _, d in ratios[name]])
            if max(abs(prefill - 1), abs(decode - 1)) > _SAME:
                found.append(_scaled(believed_type.profile, prefill, decode, model, name))
    return found


def _mean_profile(key: Key, members: Sequence[PlacedInstance], model: ModelShape) -> Profile:
    rows = [dataclasses.astuple(p.profile.constants) for p in members]
    constants = Constants(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))
    first = members[0].profile
    source = dict(first.source)
    if observed := [p.instance.id for p in members if p.instance.observed]:
        source |= {"how": "measured", "note": f"observed by the gateway on {', '.join(observed)}"}
    return _planned(first, key[0], model, constants, source)


def _ratio(
    observed: Profile, believed: Profile, mean_prompt: float, mean_output: float
) -> tuple[float, float]:
    """Of prefill and of decode times, at a full batch of mean requests."""
    held = mean_prompt + mean_output / 2
    batch = max(1.0, min(believed.max_num_seqs, believed.kv_capacity_tokens / held))
    decode = decode_step_time_s(observed.constants, batch, held)
    prefill = prefill_time_s(observed.constants, 1, mean_prompt)
    decode /= decode_step_time_s(believed.constants, batch, held)
    believed_prefill = prefill_time_s(believed.constants, 1, mean_prompt)
    return (prefill / believed_prefill if believed_prefill > 0 else 1.0), decode


def _scaled(
    profile: Profile, prefill: float, decode: float, model: ModelShape, name: str
) -> Profile:
    constants = profile.constants.scaled(prefill, decode)
    note = f"prefill × {prefill:.2f}, decode × {decode:.2f}, as at the sizes that run"
    source = dict(profile.source) | {"note": note}
    return _planned(profile, name, model, constants, source)


def _geometric_mean(values: Sequence[float]) -> float:
    positive = [value for value in values if value > 0]
    if not positive:
        return 1.0
    return math.exp(sum(math.log(value) for value in positive) / len(positive))


def _planned(
    profile: Profile, gpu: str, model: ModelShape, constants: Constants, source: dict[str, object]
) -> Profile:
    """With the plan's names; stored as its model is, which the gateway's profiles do not say."""
    if model.quantization is not None:
        source["quantization"] = model.quantization.method
    return dataclasses.replace(
        profile, gpu=gpu, model=model.name, constants=constants, source=source
    )


def with_running_types(question: Question, present: Present, model: ModelShape) -> Question:
    """The question with every running type among those that can be deployed: it evidently can."""
    types = dict(question.types)
    for each in present.placed:
        if each.key in types:
            continue
        tokens = each.instance.kv_capacity_tokens or each.profile.kv_capacity_tokens
        kv_bytes = tokens * model.kv_token_bytes(each.key[1])
        memory = MemoryEstimate(tokens, kv_bytes, {}, 0.0, False, "measured")
        profile = dataclasses.replace(each.profile, kv_capacity_tokens=tokens)
        types[each.key] = InstanceType(*each.key, profile, memory, 0.0)
    unfit = tuple(u for u in question.unfit if (u.accelerator, u.tensor_parallel) not in types)
    return dataclasses.replace(question, types=types, unfit=unfit)


def capacity_notes(present: Present, types: Mapping[Key, InstanceType]) -> list[str]:
    """Differences between the engines' reported KV capacity and the plan's."""
    notes = []
    for each in present.placed:
        reported, found = each.instance.kv_capacity_tokens, types.get(each.key)
        if reported is None or found is None:
            continue
        modelled = found.memory.kv_capacity_tokens
        if abs(reported / modelled - 1) > _KV_APART:
            notes.append(
                f"{each.instance.id} reports {reported} KV tokens, the plan reckons with "
                f"{modelled}: it may run with other settings than the file's engine section"
            )
    return notes


def simulate_present(question: Question, layouts: Mapping[str, Layout]) -> PlanCandidate | None:
    """The capacity of a deployment, by the same trials as a plan's candidates; None: nothing fits.

    Latencies are for ``question.goals.rate_per_s``; without one there are none.
    """
    mix = Mix.of(question.lengths, question.seed)
    machines = {machine.id: machine for machine in question.machines}
    keys = Counter((machines[i].accelerator, t) for i, of in layouts.items() for t in of)
    counts = {question.types[key].profile: n for key, n in sorted(keys.items())}
    taken = sum(map(sum, layouts.values()))
    alone: dict[Profile, Alone] = {}
    for profile in counts:
        of_it = question.alone(profile, mix, profile.tensor_parallel / taken)
        if of_it is None:
            return None
        alone[profile] = of_it
    system = reduced(counts, alone, question.requests)
    most = sum(alone[profile].tokens_per_s * n for profile, n in counts.items())
    figures = question.saturate(system, mix, most)
    if figures is None:
        return None
    goals, goodput, at_rate = question.goals, None, None
    if goals.name == "goodput":
        goodput = question.goodput(system, mix, figures)
    if goals.rate_per_s is not None:
        # None if it is too much.
        if figures.tokens_per_s >= (1 + HEADROOM) * goals.rate_per_s * mix.mean_tokens:
            at_rate = question.trials.hold(system, mix, goals.rate_per_s)
    return PlanCandidate(
        goodput_per_s=None if goodput is None else goodput.rate_per_s,
        layouts=layouts,
        estimate_paper_tokens_per_s=math.nan,
        estimate_tokens_per_s=math.nan,
        simulated=figures,
        accelerators=taken,
        idle_accelerators=sum(machines[i].count - sum(of) for i, of in layouts.items() if of),
        usd_per_million_tokens=usd_per_million_tokens(
            question.machines, layouts, figures.tokens_per_s
        ),
        alone_tokens_per_s=most,
        at_rate=at_rate,
    )


def aligned(
    candidate: PlanCandidate, machines: Sequence[Machine], layouts: Mapping[str, Layout]
) -> PlanCandidate:
    """The same candidate with its layouts assigned to equal machines so that fewest must change."""
    result = dict(candidate.layouts)
    for group in group_machines(machines):
        left = Counter(candidate.layouts[i] for i in group.ids)
        moved = []
        for machine_id in group.ids:
            now = layouts[machine_id]
            if left[now] > 0:
                left[now] -= 1
                result[machine_id] = now
            else:
                moved.append(machine_id)
        for machine_id, layout in zip(moved, left.elements(), strict=True):
            result[machine_id] = layout
    return dataclasses.replace(candidate, layouts=result)


# Compared with the best


@dataclass(frozen=True, slots=True)
class Comparison:
    """The best candidate of a plan compared with the running setup.

    Args:
        now: the running setup, simulated; None: nothing of the mix fits it.
    """

    plan: Plan
    present: Present
    now: PlanCandidate | None

    @property
    def best(self) -> PlanCandidate:
        return self.plan.best

    @property
    def changes(self) -> list[tuple[str, Layout, Layout]]:
        """(machine, layout now, proposed layout) of every machine that would change."""
        now, proposed = self.present.layouts, self.best.layouts
        return [(m, now[m], layout) for m, layout in proposed.items() if layout != now[m]]

    @property
    def gain(self) -> float | None:
        """Of throughput, relative; None if one side has none."""
        if self.now is None or self.now.simulated is None or self.best.simulated is None:
            return None
        return self.best.simulated.tokens_per_s / self.now.simulated.tokens_per_s - 1

    @property
    def worth_it(self) -> bool:
        """Whether the proposal is better at the goal by more than the simulator's noise."""
        best, now = self.best, self.now
        if not self.changes:
            return False
        if now is None:
            return True
        if self.plan.goal == "goodput" and best.goodput_per_s is not None:
            return best.goodput_per_s > (now.goodput_per_s or 0.0) * (1 + NOISE)
        if self.plan.goal == "cost" and best.usd_per_million_tokens and now.usd_per_million_tokens:
            return best.usd_per_million_tokens < now.usd_per_million_tokens * (1 - NOISE)
        if self.plan.goal == "fewest":
            holds_more = best.holds is True and now.at_rate is None
            return best.accelerators < now.accelerators or holds_more
        return (self.gain or 0.0) > NOISE


def compare(plan: Plan, question: Question, present: Present, policy: str) -> Comparison:
    """Compare the plan, its best candidate changing as few machines as possible, with what runs.

    The running setup is simulated under the gateway's own policy, at the rate of the plan's
    latencies.
    """
    best = aligned(plan.best, plan.machines, present.layouts)
    goals = dataclasses.replace(question.goals, rate_per_s=plan.rate_per_s or None)
    asked = dataclasses.replace(question, policy=policy, goals=goals)
    now = simulate_present(asked, present.layouts)
    if now is not None and _is_as_good(now, best, plan):
        return Comparison(_led_by(now, plan), present, now)
    plan = dataclasses.replace(
        plan,
        candidates=(best, *plan.candidates[1:]),
        pareto=tuple(best if c == plan.best else c for c in plan.pareto),
    )
    return Comparison(plan, present, now)


def _is_as_good(now: PlanCandidate, best: PlanCandidate, plan: Plan) -> bool:
    """Whether the simulation ranks the running setup at least as high as the best found.

    The search does not try everything; its result is no reason to lose something by a change.
    """
    if plan.goal != "throughput" or now.simulated is None or best.simulated is None:
        return False
    if best.at_rate is not None and now.at_rate is None:
        return False
    return now.simulated.tokens_per_s >= best.simulated.tokens_per_s


def _led_by(now: PlanCandidate, plan: Plan) -> Plan:
    """With the running setup as the best, and not a second time among the others."""
    others = [c for c in plan.candidates if c.layouts != now.layouts]
    led = [dataclasses.replace(c, why_not=c.why_not or "no more than what runs") for c in others]
    known = dict(zip(map(id, others), led, strict=True))
    pareto = tuple(known[id(c)] for c in plan.pareto if id(c) in known)
    note = "what runs does at least as much as the best that the search found"
    return dataclasses.replace(
        plan, candidates=(now, *led), pareto=pareto, notes=(*plan.notes, note)
    )
