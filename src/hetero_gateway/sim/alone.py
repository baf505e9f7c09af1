"""One instance alone and saturated: its throughput in steady state. Pure.

The planner ranks instance types by it, and the sum over a cluster's instances is the bound that
simulations are compared with. docs/design/search.md explains how the start and the end of a run are
excluded; what half-done requests have generated counts as prompt. Using only fresh requests, from
the first third to the last first token, was 1.5 to 2.0 % high.

All instances get the same requests in the same order, as far as they accept them: the remaining
difference between two is theirs, not the draw's. Tokens are output tokens in the window; the
prompts' are added in the mix's proportion.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from hetero_gateway.core.costs.arrays import Integers
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.sim.cluster import Records
from hetero_gateway.sim.engine import DEFAULT_MAX_BATCHED_TOKENS, Scheduling
from hetero_gateway.sim.recorded import Placements, run_as_placed
from hetero_gateway.sim.result import tokens_between
from hetero_gateway.sim.workload import Lengths, Workload

# Samples for the mix's moments, and the pool of half-done requests.
_POOL = 20_000
# Requests of an instance alone, and the minimum in its batches. All instances get the same
# requests, so that their number decides how well the mix is known, not which instance wins.
_REQUESTS = 5000
_BATCHES = 6
# Requests of the preceding run that only finds the batch.
_FIRST_BATCHES = 3
# New requests are drawn this many at a time.
_BLOCK = 500
# A batch below this share of what fits is not limited by memory.
FILLED = 0.85

_MIX, _HALF_DONE, _FRESH = range(3)


@dataclass(frozen=True, slots=True)
class Engines:
    """How the engines schedule; see ``sim.engine``."""

    scheduling: Scheduling = "chunked"
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS


@dataclass(frozen=True, slots=True)
class Mix:
    """A workload's lengths, and their statistics. Make it with ``of``.

    ``held_tokens``: a running request's tokens in the cache, in the mean over its stay.
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
    def of(cls, lengths: Lengths, seed: int) -> Self:
        prompt, output = lengths.draw(_POOL, np.random.default_rng((seed, _MIX)))
        mean_output = float(output.mean())
        held = float((output * (prompt + output / 2)).mean()) / mean_output
        return cls(
            lengths, seed, prompt, output,
            float(prompt.mean()), mean_output, float(output.std()), held,
        )  # fmt: skip

    @property
    def mean_tokens(self) -> float:
        """Prompt and output tokens of a request."""
        return self.mean_prompt + self.mean_output

    @property
    def tokens_per_output_token(self) -> float:
        """Prompt and output tokens for one output token."""
        return 1 + self.mean_prompt / self.mean_output

    def batch(self, profile: Profile) -> float:
        """About how many sequences an instance runs when saturated."""
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


@dataclass(frozen=True, slots=True)
class Alone:
    """The performance of one saturated instance of a type, alone, on the mix.

    ``batch`` is the mean number of running sequences; ``step_s`` the mean time between two tokens
    of one of them, including prefills in between. ``limit``: what keeps the batch from growing.
    """

    tokens_per_s: float
    output_tokens_per_s: float
    batch: float
    step_s: float
    limit: str  # "KV", "max_num_seqs", or "prefill": they use the time, and nothing waits for KV


def run_alone(
    profile: Profile, mix: Mix, engines: Engines, requests: int | None = None
) -> Alone | None:
    """One saturated instance; None if nothing of the mix fits it.

    It is run twice: the first run finds its number of sequences, which is fewer than fit if
    prefills take most of the time, and the second begins with as many half-done ones.

    Args:
        requests: at least this many, besides the half-done ones; None: 5 000.
    """
    fitting = math.ceil(mix.batch(profile))
    found = _run_alone(profile, mix, engines, fitting, _FIRST_BATCHES * fitting)
    if found is None:
        return None
    batch = math.ceil(found.batch)
    fresh = max(_REQUESTS if requests is None else requests, _BATCHES * batch)
    return _run_alone(profile, mix, engines, batch, fresh)


def _run_alone(
    profile: Profile, mix: Mix, engines: Engines, half_done: int, fresh: int
) -> Alone | None:
    prompt, output = mix.requests(half_done, fresh)
    workload = Workload(np.zeros(prompt.size), prompt, output)
    records = simulate_alone(profile, workload, engines)
    window = stride(records, half_done)
    if window is None:
        return None
    output_tokens_per_s = tokens_between(workload, records, *window) / (window[1] - window[0])
    batch = mean_running(records, *window)
    fitting = profile.kv_capacity_tokens / mix.held_tokens
    if batch < FILLED * min(profile.max_num_seqs, fitting):
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


def simulate_alone(profile: Profile, workload: Workload, engines: Engines) -> Records:
    """Run requests on one instance, as they arrive; those that never fit stay unfinished."""
    placements = Placements(
        np.zeros(len(workload), np.int64),
        workload.arrival_s,
        workload.prompt_tokens,
        workload.output_tokens,
    )
    most = max(engines.max_batched_tokens, profile.max_num_seqs)
    return run_as_placed([profile], placements, engines.scheduling, most)


def stride(records: Records, half_done: int) -> tuple[float, float] | None:
    """The steady state: from when the half-done requests run until a batch before the queue is
    empty.

        Of a run with everything at once, in seconds; None if too little finished.
    """
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


def mean_running(records: Records, from_s: float, to_s: float) -> float:
    """Mean number of sequences in a window that have a first token and are not done."""
    done = np.isfinite(records.finish_s)
    begin_s = np.maximum(records.first_token_s[done], from_s)
    end_s = np.minimum(records.finish_s[done], to_s)
    return float(np.maximum(end_s - begin_s, 0).sum()) / (to_s - from_s)
