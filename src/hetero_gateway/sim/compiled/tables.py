"""Requests, engines and instances as tables; and reporting the engines' logs.

A row of a table is a record with named fields. numba passes a table as a few numbers: with an array
for each field, passing them from function to function would dominate compile time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import Integers
from hetero_gateway.core.lengths.predictors import add_to
from hetero_gateway.core.policies.member import Member
from hetero_gateway.sim.kernel import submit

# An array, where the kernel's own annotations have lists.
KernelTable = Any
# Rows with named fields, and one of them.
Table = Any
Row = Any


def fields(kind: str, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


def record(*of: tuple[Any, ...]) -> np.dtype[np.void]:
    return np.dtype([*of], align=True)


def table(size: int, kind: np.dtype[np.void]) -> Table:
    """Rows of zeros."""
    return np.zeros(size, kind).view(np.recarray)


# The workload, and its outcomes: ``cluster.Records``. ``length_class``: of the prompt, as the
# predictor has it. ``predicted_tokens``: output tokens, once it has arrived. Under ``finish-time``
# its ``turn_s`` in the queue; its ``stage``, -1 if it does not stream; the step clock at its first
# token, ``joined``; and its ``place`` among those that stream with it.
REQUEST = record(
    *fields("f8", "arrival_s placed_s first_token_s finish_s predicted_tokens turn_s joined"),
    *fields("i8", "prompt_tokens output_tokens length_class instance preemptions stage place"),
)
# Constant properties of an instance, as the scheduler believes them.
MEMBER = record(*fields("f8", " ".join(Member._fields)))
# By slot of the engines: its request, and the charge of a policy that places at once, with the load
# as ``loads`` has it.
DIGITS = 3
SLOT = record(
    *fields("i8", "request charged_tokens"),
    ("charged_units", "i8", (DIGITS,)),
)
# From ``at_s`` on, the steps of an instance take so many times as long.
SLOWDOWN = record(*fields("f8", "at_s factor"), *fields("i8", "instance"))


class EngineTables(NamedTuple):
    """The kernel's tables (``sim/kernel.py``), and those of their slots.

    ``free``: unused slots; free[0] counts them, the others follow. ``capacity_tokens``: of each
    instance, the largest prompt + output - 1 that it can ever finish.
    """

    q: KernelTable
    n: KernelTable
    x: KernelTable
    c: KernelTable
    k: KernelTable
    first: KernelTable
    log: KernelTable
    log_s: KernelTable
    slots: Table
    free: Integers
    capacity_tokens: Integers


def member_of(m: Row) -> Member:
    """The row of an instance as the value that the rules pass on."""
    return Member(
        m.p1, m.p2, m.p3, m.p4, m.p5, m.p6, m.p7, m.p8, m.p9, m.kv_capacity_tokens,
        m.kv_limit_tokens, m.max_num_seqs, m.weight, m.seats, m.capacity, m.kind,
        m.first_token_s, m.plans_ahead, m.experts_awake_at, m.idle_expert_s,
    )  # fmt: skip


def set_members(rows: Table, members: Sequence[Member]) -> None:
    for name, values in zip(Member._fields, zip(*members, strict=True), strict=True):
        rows[name] = values


def start(e: EngineTables, r: Row, request: int, now_s: float) -> int:
    """Put a request into its instance's engine; returns its slot, of which there must be one.

    -1: refused.
    """
    r.placed_s = now_s
    i, prompt, output = r.instance, r.prompt_tokens, r.output_tokens
    if prompt + output - 1 > e.capacity_tokens[i]:
        return -1
    slot = e.free[e.free[0]]
    e.free[0] -= 1
    e.slots[slot].request = request
    submit(e.q, e.n, e.x, e.first, i, slot, prompt, output, 0, now_s)
    return int(slot)


def give_back(e: EngineTables, slot: int) -> None:
    """Its request has finished."""
    e.free[0] += 1
    e.free[e.free[0]] = slot


def with_room(e: EngineTables) -> EngineTables:
    """The same, with twice the slots; all existing ones are in use."""
    size = len(e.q)

    def twice(table: Any) -> Any:
        return np.concatenate((table, np.zeros_like(table)))

    free = np.concatenate(([size], np.arange(2 * size - 1, size - 1, -1), np.zeros(size, np.int64)))
    return e._replace(q=twice(e.q), slots=twice(e.slots).view(np.recarray), free=free)


# ``core/lengths/predictors``: one model's, from its first request on

# More than the bits of any prompt's length.
CLASSES = 64
_ALL = 0  # the row of all lengths; the others are those of a length's bits, from 1 on


class BucketMeans(NamedTuple):
    """``BucketMeanPredictor``. ``means``: rows of ``RunningMean``; weight 0: none yet.

    ``learns``: if not, only ``prior_tokens`` is known (``ConstantPredictor``). ``told``: the
    requests have their predictions already.
    """

    means: Table
    prior_tokens: float
    prior_requests: float
    learns: bool
    told: bool


_MEAN = record(*fields("f8", "value weight"))


def bucket_means(
    prior_tokens: float, prior_requests: float = 1.0, *, learns: bool, told: bool = False
) -> BucketMeans:
    return BucketMeans(table(CLASSES, _MEAN), prior_tokens, prior_requests, learns, told)


def predict(b: BucketMeans, r: Row) -> None:
    """Set the expected tokens of a request."""
    if b.told:
        return
    for mean in (b.means[r.length_class], b.means[_ALL]):
        if mean.weight > 0:
            r.predicted_tokens = max(1.0, mean.value)
            return
    r.predicted_tokens = max(1.0, b.prior_tokens)


def learn(b: BucketMeans, r: Row) -> None:
    """A request has finished."""
    if not b.learns:
        return
    mean, overall = b.means[r.length_class], b.means[_ALL]
    if overall.weight == 0:
        overall.value, overall.weight = b.prior_tokens, b.prior_requests
    if mean.weight == 0:
        mean.value, mean.weight = overall.value, b.prior_requests
    add_to(overall, r.output_tokens)
    add_to(mean, r.output_tokens)
