"""Requests, engines and instances as arrays; what the engines have logged, passed on."""

from typing import Any, NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import Flags, FloatArray, Integers
from hetero_gateway.core.lengths.predictors import add_to
from hetero_gateway.core.policies.estimates import holds
from hetero_gateway.core.policies.member import Member
from hetero_gateway.sim.kernel import submit

# Columns of a table of members.
KV_CAPACITY_TOKENS, KV_LIMIT_TOKENS, CAPACITY_PER_S = (
    Member._fields.index(name) for name in ("kv_capacity_tokens", "kv_limit_tokens", "capacity")
)

# An array, where the kernel's own annotations have lists.
KernelTable = Any


class Requests(NamedTuple):
    """The workload, and what becomes of it: ``cluster.Records``. All (N,).

    ``length_class``: of the prompt, as the predictor has it. ``predictions``: in place of the
    predictor's, output tokens; or of no length.
    """

    arrival_s: FloatArray
    prompt_tokens: Integers
    output_tokens: Integers
    length_class: Integers
    predictions: FloatArray
    instance: Integers
    placed_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    preemptions: Integers


class EngineTables(NamedTuple):
    """The kernel's tables (``sim/kernel.py``), and by slot the request that has it.

    ``free``: slots that nobody has; free[0] counts them, the others follow. ``capacity_tokens``:
    of each instance, the largest prompt + output - 1 that it can ever finish. ``charged_tokens``,
    ``charged_units``: by slot, what a policy that places at once has charged for its request.
    """

    q: KernelTable
    n: KernelTable
    x: KernelTable
    c: KernelTable
    k: KernelTable
    first: KernelTable
    log: KernelTable
    log_s: KernelTable
    request: Integers
    free: Integers
    capacity_tokens: Integers
    charged_tokens: Integers
    charged_units: Integers


class PoolTable(NamedTuple):
    """What never changes of the instances, as the scheduler believes it: a row is a ``Member``."""

    members: FloatArray
    theta: float


class Slowdowns(NamedTuple):
    """From when the steps of an instance take so many times as long; in the order of time."""

    at_s: FloatArray
    instance: Integers
    factor: FloatArray


def member_of(members: FloatArray, i: int) -> Member:
    m = members[i]
    return Member(
        m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], m[8], m[9], m[10], m[11], m[12], m[13],
        m[14], m[15],
    )  # fmt: skip


def candidates(pool: PoolTable, tokens: float, takes: Flags) -> int:
    """Set who can hold a request of so many tokens; returns how many can."""
    count = 0
    for i in range(len(takes)):
        takes[i] = holds(member_of(pool.members, i), tokens)
        count += takes[i]
    return count


def start(e: EngineTables, r: Requests, request: int, i: int, now_s: float) -> int:
    """Put a placed request into its engine; its slot, of which there must be one. -1: refused."""
    r.instance[request] = i
    r.placed_s[request] = now_s
    prompt, output = r.prompt_tokens[request], r.output_tokens[request]
    if prompt + output - 1 > e.capacity_tokens[i]:
        return -1
    slot = e.free[e.free[0]]
    e.free[0] -= 1
    e.request[slot] = request
    submit(e.q, e.n, e.x, e.first, i, slot, prompt, output, 0, now_s)
    return int(slot)


def give_back(e: EngineTables, slot: int) -> None:
    """Its request has finished."""
    e.free[0] += 1
    e.free[e.free[0]] = slot


def with_room(e: EngineTables) -> EngineTables:
    """The same, with twice the slots; somebody has each of those that there are."""
    size = len(e.q)

    def twice(table: Any) -> Any:
        return np.concatenate((table, np.zeros_like(table)))

    free = np.concatenate(([size], np.arange(2 * size - 1, size - 1, -1), np.zeros(size, np.int64)))
    return e._replace(
        q=twice(e.q),
        request=twice(e.request),
        free=free,
        charged_tokens=twice(e.charged_tokens),
        charged_units=twice(e.charged_units),
    )


# ``core/lengths/predictors``: one model's, from its first request on

# More than the bits of any prompt's length.
CLASSES = 64
_ALL = 0  # the row of all lengths; the others are those of a length's bits, from 1 on


class BucketMeans(NamedTuple):
    """``BucketMeanPredictor``. ``means``: rows of ``RunningMean``; weight 0: none yet.

    ``learns``: or else ``prior_tokens`` is all that is known (``ConstantPredictor``).
    """

    means: Any
    prior_tokens: float
    prior_requests: float
    learns: bool


def bucket_means(prior_tokens: float, prior_requests: float = 1.0, *, learns: bool) -> BucketMeans:
    means = np.zeros(CLASSES, [("value", "f8"), ("weight", "f8")]).view(np.recarray)
    return BucketMeans(means, prior_tokens, prior_requests, learns)


def predicted_tokens(b: BucketMeans, r: Requests, request: int) -> float:
    if len(r.predictions) > 0:
        return float(r.predictions[request])
    for mean in (b.means[r.length_class[request]], b.means[_ALL]):
        if mean.weight > 0:
            return float(max(1.0, mean.value))
    return max(1.0, b.prior_tokens)


def learn(b: BucketMeans, length_class: int, output_tokens: int) -> None:
    if not b.learns:
        return
    mean, overall = b.means[length_class], b.means[_ALL]
    if overall.weight == 0:
        overall.value, overall.weight = b.prior_tokens, b.prior_requests
    if mean.weight == 0:
        mean.value, mean.weight = overall.value, b.prior_requests
    add_to(overall, output_tokens)
    add_to(mean, output_tokens)
