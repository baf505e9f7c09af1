"""A lower bound on the machines that any solution needs: a linear program beside the search.

docs/design/search.md explains its use: it never exceeds what the simulation needs.

    λ_b   requests/s of a bucket     w  s that one of them adds to the steps that it is in
    s     steps/s of an instance     h  tokens that it holds, in the mean over its output
    S, K  most sequences, KV tokens  T  limit of TPOT

    p8·s + Σ λ·w  ≤ 1        all of an instance's time
    Σ λ·(O-1)·h   ≤ K·s      tokens held in a step
    Σ λ·(O-1)     ≤ S·s      sequences in a step
    Σ λ·w         ≤ 1 - p8/T what is served within TPOT: its steps take at most T in the mean

The first three with s eliminated are linear in λ. Requests that may miss the limits (1 - share) are
served without the last one, in a separate part of the instances' time. A bucket whose shortest
prompt cannot meet TTFT on an instance type is not served within the limits there.

Left out, which only lowers the bound: p3, p4 and p7 of shared steps, waiting, blocks, evictions,
what a prefill holds, how instances fit into one machine together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.planner.goals import Goals, price_per_hour_usd
from hetero_gateway.planner.layouts import Group, together
from hetero_gateway.planner.plan import Key
from hetero_gateway.sim.alone import Mix

# Slices of prompts, and of outputs within each: finer ones raise the bound by less than 0.5 %.
_SLICES = 6
_TIME_LIMIT_S = 5.0
_GAP = 1e-4


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Requests of about one size: their share, and means over them."""

    share: float
    prompt: float
    shortest_prompt: float
    pairs: float  # attended by a prefill
    steps: float  # after the first token
    held_steps: float  # tokens held, summed over those steps


def lower_bound(
    groups: Sequence[Group],
    profiles: Mapping[Key, Profile],
    mix: Mix,
    goals: Goals,
    rate_per_s: float,
    *,
    by_price: bool,
) -> float | None:
    """The least that a set can need; None: all machines together cannot hold the rate.

    Args:
        profiles: of the types that can be deployed, by (accelerator, tensor parallelism).
        by_price: in USD per hour of used machines; else in used accelerators.
    """
    # Importing takes as long as finding a bound, and only plans with a rate need it.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    buckets = _buckets(mix)
    kinds = [
        (g, t, profile)
        for g, group in enumerate(groups)
        for (accelerator, t), profile in sorted(profiles.items())
        if accelerator == group.accelerator and t <= group.count
    ]
    program = _Program(groups, kinds, buckets, goals, rate_per_s)
    costs = program.costs(by_price)
    rows, columns, values = zip(*program.entries, strict=True)
    found = milp(
        costs,
        integrality=program.integers,
        bounds=Bounds(0, program.most),
        constraints=LinearConstraint(
            coo_array((values, (rows, columns)), shape=(program.height, costs.size)).tocsr(),
            program.lower,
            program.upper,
        ),
        options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": _GAP},
    )
    if found.x is None:
        return None if found.status == 2 else 0.0
    return float(found.mip_dual_bound or 0.0)


class _Program:
    """Columns: machines by group, instances by kind, then for each kind the time spent within the
    limits and the rates of its buckets, and the same outside the limits."""

    def __init__(
        self,
        groups: Sequence[Group],
        kinds: Sequence[tuple[int, int, Profile]],
        buckets: Sequence[_Bucket],
        goals: Goals,
        rate_per_s: float,
    ) -> None:
        self._groups, self._kinds, self._buckets = groups, kinds, buckets
        self.entries: list[tuple[int, int, float]] = []  # row, column, value
        self.lower: list[float] = []
        self.upper: list[float] = []
        width = len(buckets) + 1
        first = len(groups) + len(kinds)
        size = first + 2 * width * len(kinds)
        self.integers = np.zeros(size, dtype=np.int64)
        self.integers[:first] = 1
        self.most = np.full(size, np.inf)
        self.most[: len(groups)] = [g.machines for g in groups]
        within = [first + 2 * width * k for k in range(len(kinds))]
        free = [column + width for column in within]
        tpot_s = goals.slo.tpot_s if goals.slo is not None else math.inf
        ttft_s = goals.slo.ttft_s if goals.slo is not None else math.inf
        share = goals.share if goals.slo is not None else 0.0
        for g, group in enumerate(groups):
            own = [
                (len(groups) + k, float(_accelerators(t)))
                for k, (of, t, _) in enumerate(kinds)
                if of == g
            ]
            self._row([(g, -float(group.count)), *own], -math.inf, 0.0)
        for k, (_, _, profile) in enumerate(kinds):
            instances = len(groups) + k
            parts = [(within[k], 1.0), (free[k], 1.0), (instances, -1.0)]
            self._row(parts, -math.inf, 0.0)
            self._serve(profile, within[k], tpot_s)
            self._serve(profile, free[k], math.inf)
            for b, bucket in enumerate(buckets):
                if profile.constants.p1 * bucket.shortest_prompt > ttft_s:
                    self.most[within[k] + 1 + b] = 0.0
        for b, bucket in enumerate(buckets):
            served = [(column + 1 + b, 1.0) for column in (*within, *free)]
            self._row(served, bucket.share * rate_per_s, math.inf)
        kept = [(column + 1 + b, 1.0) for column in within for b in range(len(buckets))]
        self._row(kept, share * rate_per_s, math.inf)

    @property
    def height(self) -> int:
        return len(self.lower)

    def costs(self, by_price: bool) -> FloatArray:
        result = np.zeros(self.integers.size)
        if by_price:
            result[: len(self._groups)] = [price_per_hour_usd(g) for g in self._groups]
        else:
            result[len(self._groups) :][: len(self._kinds)] = [
                _accelerators(t) for _, t, _ in self._kinds
            ]
        return result

    def _serve(self, profile: Profile, time: int, tpot_s: float) -> None:
        """Constraints of a part of an instance's time (column ``time``, followed by its rates)."""
        c = profile.constants
        work = [
            c.p1 * b.prompt + c.p2 + c.p9 * b.pairs + c.p6 * b.steps + c.p5 * b.held_steps
            for b in self._buckets
        ]
        for most, needs in (
            (profile.kv_capacity_tokens, [b.held_steps for b in self._buckets]),
            (profile.max_num_seqs, [b.steps for b in self._buckets]),
        ):
            used = [w + c.p8 * need / most for w, need in zip(work, needs, strict=True)]
            self._row([(time, -1.0), *enumerate(used, time + 1)], -math.inf, 0.0)
        if math.isfinite(tpot_s):
            left = max(0.0, 1 - c.p8 / tpot_s)
            self._row([(time, -left), *enumerate(work, time + 1)], -math.inf, 0.0)

    def _row(self, parts: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        self.entries += [(self.height, *part) for part in parts]
        self.lower.append(lower)
        self.upper.append(upper)


def _accelerators(size: int) -> int:
    """Of one instance, on all the machines that it spans."""
    return int(size) * together((size,))


def _buckets(mix: Mix) -> list[_Bucket]:
    """Slices of equal numbers by prompt, and within each by output."""
    prompt, output = mix.prompt_pool.astype(float), mix.output_pool.astype(float)
    result = []
    for of_prompt in np.array_split(np.argsort(prompt, kind="stable"), _SLICES):
        order = of_prompt[np.argsort(output[of_prompt], kind="stable")]
        for chosen in np.array_split(order, _SLICES):
            if chosen.size:
                i, steps = prompt[chosen], output[chosen] - 1
                result.append(
                    _Bucket(
                        chosen.size / prompt.size,
                        float(i.mean()),
                        float(i.min()),
                        float((i * i / 2).mean()),
                        float(steps.mean()),
                        float((steps * (i + steps / 2)).mean()),
                    )
                )
    return result
