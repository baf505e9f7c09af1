"""What the simulator says of instance types alone, and of whole systems under a policy.

Throughput is what an engine does in its stride. Two things would bias it, and would bias small and
large t differently, as they have unequal batches:

- *The start.* Sent all at once, the requests of the first batches are of one age; short ones
  finish first and the batch is richer than it will be. So the first requests are drawn as a
  running engine would hold them: half done, long outputs more often (as each is there for as long
  as its output lasts). What they have generated counts as prompt.
- *The end.* When nothing is left to replace what finishes, the batch runs empty. So the window
  ends a batch before the last first token.

All types and systems get the same requests in the same order, as far as they take them: what is
left of a difference between two is theirs, not the draw's. Tokens are output tokens in the window;
the prompts' are added in the mix's proportion.

A system of many instances is simulated by a smaller one with as many of each type in proportion,
and a rate to match: instances behind one queue do not know how many they are. Queues of a smaller
system are a little longer, so its latencies are on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor, NormalPredictor
from hetero_gateway.core.policies import PolicyOptions, make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.planner.plan import Alone, Figures
from hetero_gateway.sim.cluster import Records, SimulatedInstance, simulate
from hetero_gateway.sim.engine import DEFAULT_MAX_BATCHED_TOKENS, Scheduling
from hetero_gateway.sim.fleet import Fleet
from hetero_gateway.sim.kernel import FINISHED, FIRST
from hetero_gateway.sim.result import tokens_between
from hetero_gateway.sim.workload import Integers, Lengths, Workload, all_at_once, gamma_arrivals

# The mix's moments, and the pool that half-done requests are drawn from.
_POOL = 20_000
# Requests of an instance alone, and how many of its batches they must be at least. All types get
# the same requests, so that their number decides how well the mix is known, not who wins.
_ALONE_REQUESTS = 5000
_ALONE_BATCHES = 6
# Of the run before it that only finds the batch.
_FIRST_BATCHES = 3
# New requests are drawn so many at a time.
_BLOCK = 500
# Batches of a whole system that follow the half-done ones; fewer where those would be more requests
# than the budget. With 2, instances of 670 sequences were not full yet: 9 % too few tokens.
_SYSTEM_BATCHES = 5
_LEAST_BATCHES = 3
# Requests of one run of a whole system, about: 0.3 to 1 s with finish-time, not compiled.
SYSTEM_REQUESTS = 2400
# At a rate: the share of the arrivals that only fills the system.
_FILL = 0.25
# A batch below this share of what fits is not kept small by memory.
_FILLED = 0.85

_MIX, _HALF_DONE, _FRESH, _ARRIVALS, _TIES, _PREDICTOR = range(6)


@dataclass(frozen=True, slots=True)
class Engines:
    """How the engines schedule; see ``sim.engine``."""

    scheduling: Scheduling = "chunked"
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS


@dataclass(frozen=True, slots=True)
class Mix:
    """A workload's lengths, and what is known of them. Make it with ``of``.

    ``held_tokens``: what a request that runs holds in the cache, in the mean over its stay.
    """

    lengths: Lengths
    seed: int
    prompt_pool: Integers
    output_pool: Integers
    mean_prompt: float
    mean_output: float
    sd_output: float
    held_tokens: float

    @classmethod
    def of(cls, lengths: Lengths, seed: int) -> Mix:
        prompt, output = lengths.draw(_POOL, np.random.default_rng((seed, _MIX)))
        mean_output = float(output.mean())
        held = float((output * (prompt + output / 2)).mean()) / mean_output
        return cls(
            lengths, seed, prompt, output,
            float(prompt.mean()), mean_output, float(output.std()), held,
        )  # fmt: skip

    @property
    def longest(self) -> int:
        """Prompt and output tokens of the longest request."""
        return int((self.prompt_pool + self.output_pool).max())

    @property
    def tokens_per_output_token(self) -> float:
        """Prompt and output tokens for one output token."""
        return 1 + self.mean_prompt / self.mean_output

    def batch(self, profile: Profile) -> float:
        """About how many sequences an instance runs when it has enough to do."""
        return max(1.0, min(profile.max_num_seqs, profile.kv_capacity_tokens / self.held_tokens))

    def requests(self, half_done: int, fresh: int) -> tuple[Integers, Integers]:
        """Prompt and output tokens: half-done requests first, then new ones."""
        rng = np.random.default_rng((self.seed, _HALF_DONE))
        share = self.output_pool / self.output_pool.sum()
        rows = rng.choice(share.size, size=half_done, p=share)
        done = np.floor(rng.random(half_done) * self.output_pool[rows]).astype(np.int64)
        # In blocks, so that a longer run begins with the requests of a shorter one.
        blocks = [
            self.lengths.draw(_BLOCK, np.random.default_rng((self.seed, _FRESH, block)))
            for block in range(-(-fresh // _BLOCK))
        ]
        prompt = np.concatenate([p for p, _ in blocks] or [np.zeros(0, np.int64)])[:fresh]
        output = np.concatenate([o for _, o in blocks] or [np.zeros(0, np.int64)])[:fresh]
        return (
            np.concatenate((self.prompt_pool[rows] + done, prompt)),
            np.concatenate((self.output_pool[rows] - done, output)),
        )


def run_alone(profile: Profile, mix: Mix, engines: Engines) -> Alone | None:
    """One instance that always has enough to do; None where nothing of the mix fits it.

    It is run twice: the first run finds how many sequences it comes to, which is fewer than fit
    where prefills take most of the time, and the second begins with as many half done.
    """
    fitting = math.ceil(mix.batch(profile))
    found = _run_alone(profile, mix, engines, fitting, _FIRST_BATCHES * fitting)
    if found is None:
        return None
    batch = math.ceil(found.batch)
    return _run_alone(profile, mix, engines, batch, max(_ALONE_REQUESTS, _ALONE_BATCHES * batch))


def _run_alone(
    profile: Profile, mix: Mix, engines: Engines, half_done: int, fresh: int
) -> Alone | None:
    prompt, output = mix.requests(half_done, fresh)
    workload = Workload(all_at_once(prompt.size), prompt, output)
    fleet = _fleet(profile, engines)
    fits = prompt + output - 1 <= fleet.capacity_tokens(0)
    slots = {}
    for request in np.flatnonzero(fits):
        slot = fleet.new_slot()
        slots[slot] = int(request)
        fleet.submit(0, slot, int(prompt[request]), int(output[request]), 0.0)
    records = _empty_records(prompt.size)
    while not fleet.advance(math.inf, False):
        _take(fleet, slots, records)
    _take(fleet, slots, records)
    window = _stride(records, half_done)
    if window is None:
        return None
    output_tokens_per_s = _tokens_per_s(workload, records, window)
    batch = _running(records, window)
    fitting = profile.kv_capacity_tokens / mix.held_tokens
    if batch < _FILLED * min(profile.max_num_seqs, fitting):
        limit = "prefill"
    else:
        limit = "max_num_seqs" if profile.max_num_seqs < fitting else "KV"
    return Alone(
        tokens_per_s=output_tokens_per_s * mix.tokens_per_output_token,
        output_tokens_per_s=output_tokens_per_s,
        batch=batch,
        step_s=batch / output_tokens_per_s,
        limit=limit,
    )


def _take(fleet: Fleet, slots: Mapping[int, int], records: Records) -> list[int]:
    """Write down what the fleet has logged; returns the slots that are free again."""
    free = []
    for k in range(1, 1 + fleet.log[0]):
        slot, kind = fleet.log[k] >> 2, fleet.log[k] & 3
        if kind == FIRST:
            records.first_token_s[slots[slot]] = fleet.log_s[k]
        elif kind == FINISHED:
            records.finish_s[slots[slot]] = fleet.log_s[k]
            free.append(slot)
    return free


def hold_alone(profile: Profile, mix: Mix, engines: Engines, rate_per_s: float) -> Figures | None:
    """One instance at a rate of arrivals; None where it does not finish a request."""
    workload = _at_rate(mix, rate_per_s, mix.batch(profile))
    fleet = _fleet(profile, engines)
    records = _empty_records(len(workload))
    slots: dict[int, int] = {}
    for request, arrival_s in enumerate(workload.arrival_s):
        complete = False
        while not complete:
            complete = fleet.advance(float(arrival_s), False)
            for slot in _take(fleet, slots, records):
                fleet.free_slot(slot)
        prompt = int(workload.prompt_tokens[request])
        output = int(workload.output_tokens[request])
        if prompt + output - 1 <= fleet.capacity_tokens(0):
            slot = fleet.new_slot()
            slots[slot] = request
            fleet.submit(0, slot, prompt, output, float(arrival_s))
    while not fleet.advance(math.inf, False):
        _take(fleet, slots, records)
    _take(fleet, slots, records)
    return _figures_at_rate(workload, records, mix, 1)


@dataclass(frozen=True, slots=True)
class System:
    """Instances by profile, in numbers.

    ``batch``: sequences that run in all of them together when they have enough to do, about.
    ``share`` is of the system that they stand for.
    """

    instances: tuple[tuple[Profile, int], ...]
    batch: float
    share: float = 1.0

    def simulated(self) -> list[SimulatedInstance]:
        """In turn, one of each kind, so that no kind comes first in a policy's order."""
        left = dict(enumerate(count for _, count in self.instances))
        result: list[SimulatedInstance] = []
        while any(left.values()):
            for k, (profile, _) in enumerate(self.instances):
                if left[k]:
                    left[k] -= 1
                    name = InstanceId(f"i{len(result)}")
                    result.append(SimulatedInstance(name, profile, profile))
        return result


def reduced(counts: Mapping[Profile, int], alone: Mapping[Profile, Alone], requests: int) -> System:
    """The largest system in proportion whose runs take about so many requests.

    Args:
        counts: instances by profile, each above 0, in an order that does not change.
        alone: what each does alone; its batch, and its share of the system, are reckoned by it.
    """
    batches = sum(alone[profile].batch * n for profile, n in counts.items())
    factor = min(1.0, requests / (batches * (1 + _SYSTEM_BATCHES)))
    kept = tuple((profile, max(1, round(n * factor))) for profile, n in counts.items())
    whole = sum(alone[profile].tokens_per_s * n for profile, n in counts.items())
    return System(
        kept,
        sum(alone[profile].batch * n for profile, n in kept),
        sum(alone[profile].tokens_per_s * n for profile, n in kept) / whole,
    )


def saturate(
    system: System, policy: str, mix: Mix, engines: Engines, requests: int, compiled: bool
) -> Figures | None:
    """Everything at once, in its stride, and scaled to the system it stands for."""
    instances = system.simulated()
    half_done = math.ceil(system.batch)
    batches = np.clip(requests / half_done - 1, _LEAST_BATCHES, 4 * _SYSTEM_BATCHES)
    prompt, output = mix.requests(half_done, max(100, math.ceil(batches * half_done)))
    workload = Workload(all_at_once(prompt.size), prompt, output)
    records = _simulate(instances, workload, policy, mix, engines, compiled)
    window = _stride(records, half_done)
    if window is None:
        return None
    output_tokens_per_s = _tokens_per_s(workload, records, window)
    return Figures(
        tokens_per_s=output_tokens_per_s * mix.tokens_per_output_token / system.share,
        output_tokens_per_s=output_tokens_per_s / system.share,
        latency_mean_s=math.nan,
        latency_p99_s=math.nan,
        ttft_mean_s=math.nan,
        ttft_p99_s=math.nan,
        tpot_mean_s=math.nan,
        tpot_p99_s=math.nan,
        batch=_running(records, window) / len(instances),
    )


def hold(
    system: System,
    policy: str,
    mix: Mix,
    engines: Engines,
    rate_per_s: float,
    requests: int,
    compiled: bool,
) -> Figures | None:
    """Poisson arrivals at a rate of the whole system; None where no request finishes."""
    instances = system.simulated()
    workload = _at_rate(mix, rate_per_s * system.share, system.batch, requests)
    records = _simulate(instances, workload, policy, mix, engines, compiled)
    return _figures_at_rate(workload, records, mix, len(instances), system.share)


# Workloads and records


def _at_rate(mix: Mix, rate_per_s: float, batch: float, requests: int = 1500) -> Workload:
    count = max(400, min(requests, math.ceil(batch * (1 + _SYSTEM_BATCHES))))
    prompt, output = mix.requests(0, count)
    rng = np.random.default_rng((mix.seed, _ARRIVALS))
    return Workload(gamma_arrivals(count, rate_per_s, 1.0, rng), prompt, output)


def _fleet(profile: Profile, engines: Engines) -> Fleet:
    return Fleet(
        [profile],
        scheduling=engines.scheduling,
        max_batched_tokens=max(engines.max_batched_tokens, profile.max_num_seqs),
    )


def _empty_records(size: int) -> Records:
    def times() -> NDArray[np.float64]:
        return np.full(size, math.nan)

    return Records(
        np.zeros(size, np.int64), np.zeros(size), times(), times(), np.zeros(size, np.int64)
    )


def _simulate(
    instances: Sequence[SimulatedInstance],
    workload: Workload,
    policy: str,
    mix: Mix,
    engines: Engines,
    compiled: bool,
) -> Records:
    options = PolicyOptions(single_instance=instances[0].instance_id)
    scheduler = Scheduler(
        make_policy(policy, options),
        np.random.default_rng((mix.seed, _TIES)),
        reference=(mix.mean_prompt, mix.mean_output),
    )
    rng = np.random.default_rng((mix.seed, _PREDICTOR))
    return simulate(
        instances,
        workload,
        scheduler,
        NormalPredictor(mix.mean_output, mix.sd_output, rng)
        if policy == "paper"
        else BucketMeanPredictor(mix.mean_output),
        scheduling=engines.scheduling,
        max_batched_tokens=max(
            engines.max_batched_tokens, max(i.profile.max_num_seqs for i in instances)
        ),
        compiled=compiled,
    )


# Figures


def _stride(records: Records, half_done: int) -> tuple[float, float] | None:
    """From when the half-done requests run until a batch before nothing replaces what finishes."""
    first_s = np.sort(records.first_token_s[np.isfinite(records.finish_s)])
    if first_s.size < 2:
        return None
    # Half a batch more, for the prefills of the start, which came all at once. The other end: a
    # request's tokens are spread evenly over its stay, and once the batch runs empty they come
    # faster; ending at the last first token counted 3 % too many in runs of six batches.
    begin = min(half_done + half_done // 2, first_s.size // 3)
    end = max(first_s.size - 1 - half_done, 2 * first_s.size // 3)
    from_s, to_s = float(first_s[begin]), float(first_s[end])
    return (from_s, to_s) if to_s > from_s else None


def _tokens_per_s(workload: Workload, records: Records, window: tuple[float, float]) -> float:
    return tokens_between(workload, records, *window) / (window[1] - window[0])


def _running(records: Records, window: tuple[float, float]) -> float:
    """Mean number of sequences that have a first token and are not done."""
    done = np.isfinite(records.finish_s)
    begin_s = np.maximum(records.first_token_s[done], window[0])
    end_s = np.minimum(records.finish_s[done], window[1])
    return float(np.maximum(end_s - begin_s, 0).sum()) / (window[1] - window[0])


def _figures_at_rate(
    workload: Workload, records: Records, mix: Mix, instances: int, share: float = 1.0
) -> Figures | None:
    size = len(workload)
    counted = np.arange(size) >= int(_FILL * size)
    counted &= np.isfinite(records.finish_s)
    window = (float(workload.arrival_s[int(_FILL * size)]), float(workload.arrival_s[-1]))
    if not counted.any() or window[1] <= window[0]:
        return None
    arrival_s, finish_s = workload.arrival_s[counted], records.finish_s[counted]
    first_s, output = records.first_token_s[counted], workload.output_tokens[counted]
    latency_s, ttft_s = finish_s - arrival_s, first_s - arrival_s
    several = output >= 2
    tpot_s = (finish_s - first_s)[several] / (output[several] - 1)
    if not tpot_s.size:
        tpot_s = np.zeros(1)
    output_tokens_per_s = _tokens_per_s(workload, records, window) / share
    return Figures(
        tokens_per_s=output_tokens_per_s * mix.tokens_per_output_token,
        output_tokens_per_s=output_tokens_per_s,
        latency_mean_s=float(latency_s.mean()),
        latency_p99_s=float(np.percentile(latency_s, 99)),
        ttft_mean_s=float(ttft_s.mean()),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        tpot_mean_s=float(tpot_s.mean()),
        tpot_p99_s=float(np.percentile(tpot_s, 99)),
        batch=_running(records, window) / instances,
    )
