"""The ledger as a state machine against exact arithmetic, and its rules one by one."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from hetero_gateway.core.instances.ledger import Dispatch, Ledger
from hetero_gateway.core.types import InstanceId, Outcome
from tests.core.builders import request

UNIT_S = Fraction(1, 2**40)
ID = InstanceId("a")

# From a nanosecond to T · e^50: what the largest backlog can charge.
workloads = st.builds(
    lambda mantissa, exponent: mantissa * 10.0**exponent,
    st.floats(1, 10, exclude_max=True),
    st.integers(-9, 20),
)
outcomes = st.sampled_from(Outcome)


def exact_load(dispatches: list[Dispatch]) -> Fraction:
    """The sum of the workloads, each rounded to the ledger's unit, in exact arithmetic."""
    return sum((round(Fraction(d.workload) / UNIT_S) * UNIT_S for d in dispatches), Fraction(0))


class LedgerMachine(RuleBasedStateMachine):
    """Any order of dispatches, settlements, repeated settlements, and slots that come and go."""

    slots = Bundle("slots")
    dispatches = Bundle("dispatches")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.outstanding: dict[int, list[Dispatch]] = {}
        self.settled: list[Dispatch] = []

    @rule(target=slots)
    def add_slot(self) -> int:
        slot = self.ledger.add_slot()
        assert slot not in self.outstanding
        self.outstanding[slot] = []
        return slot

    @rule(slot=consumes(slots))
    def remove_slot(self, slot: int) -> None:
        expected = self.outstanding.pop(slot)
        orphans = self.ledger.remove_slot(slot)
        assert set(orphans) == set(expected)
        assert all(d.outcome is Outcome.INSTANCE_REMOVED for d in orphans)
        assert self.ledger.load[slot] == 0.0
        self.settled += orphans

    @rule(
        target=dispatches,
        slot=slots,
        workload=workloads,
        prompt_tokens=st.integers(1, 100_000),
        output_tokens=st.floats(0, 5000),
        sequences=st.integers(1, 8),
    )
    def dispatch(
        self,
        slot: int,
        workload: float,
        prompt_tokens: int,
        output_tokens: float,
        sequences: int,
    ) -> Dispatch:
        body = request(prompt_tokens, output_tokens, sequences=sequences)
        entry = self.ledger.dispatch(body, ID, slot, workload)
        self.outstanding[slot].append(entry)
        return entry

    @rule(target=dispatches, slot=slots, sizes=st.lists(workloads, min_size=2, max_size=30))
    def burst(self, slot: int, sizes: list[float]) -> object:
        return multiple(*(self.dispatch(slot, size, 100, 100.0, 1) for size in sizes))

    @rule(entry=consumes(dispatches), outcome=outcomes)
    def settle(self, entry: Dispatch, outcome: Outcome) -> None:
        on_slot = self.outstanding.get(entry.slot, [])
        was_outstanding = any(d is entry for d in on_slot)
        assert self.ledger.settle(entry, outcome) is was_outstanding
        if was_outstanding:
            assert entry.outcome is outcome
            on_slot.remove(entry)
            self.settled.append(entry)

    @precondition(lambda self: self.settled)
    @rule(data=st.data(), outcome=outcomes)
    def settle_again(self, data: st.DataObject, outcome: Outcome) -> None:
        entry = data.draw(st.sampled_from(self.settled))
        before = (entry.outcome, self.ledger.load.tolist(), self.ledger.kv_tokens.tolist())
        assert self.ledger.settle(entry, outcome) is False
        assert (entry.outcome, self.ledger.load.tolist(), self.ledger.kv_tokens.tolist()) == before

    @rule(slot=slots)
    def settle_all(self, slot: int) -> None:
        for entry in self.outstanding[slot]:
            assert self.ledger.settle(entry, Outcome.COMPLETED)
        self.settled += self.outstanding[slot]
        self.outstanding[slot] = []

    @invariant()
    def every_sum_is_exactly_what_is_outstanding(self) -> None:
        for slot, entries in self.outstanding.items():
            assert self.ledger.load[slot] == float(exact_load(entries))
            assert self.ledger.kv_tokens[slot] == sum(d.request.kv_tokens for d in entries)
            assert self.ledger.in_flight[slot] == len(entries)
            assert self.ledger.outstanding(slot) == set(entries)

    @invariant()
    def nothing_is_negative_and_empty_is_exactly_zero(self) -> None:
        for array in (self.ledger.load, self.ledger.kv_tokens, self.ledger.in_flight):
            assert (array >= 0).all()
        for slot in range(self.ledger.load.size):
            if not self.outstanding.get(slot):
                assert self.ledger.load[slot] == 0.0
                assert math.copysign(1, self.ledger.load[slot]) == 1
                assert self.ledger.kv_tokens[slot] == 0.0
                assert self.ledger.in_flight[slot] == 0.0


LedgerMachine.TestCase.settings = settings(
    deadline=None, derandomize=True, max_examples=40, stateful_step_count=40
)
TestLedgerAsAStateMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_dispatch_is_taken_off_by_every_outcome_and_once(outcome: Outcome) -> None:
    ledger = Ledger()
    slot = ledger.add_slot()
    entry = ledger.dispatch(request(100, 50.0), ID, slot, 1.5)
    assert (ledger.load[slot], ledger.kv_tokens[slot], ledger.in_flight[slot]) == (1.5, 150, 1)
    assert [ledger.settle(entry, outcome) for _ in range(3)] == [True, False, False]
    assert (ledger.load[slot], ledger.kv_tokens[slot], ledger.in_flight[slot]) == (0, 0, 0)
    assert entry.outcome is outcome


def test_what_is_taken_off_is_what_was_put_on() -> None:
    # The usage at the time of settling plays no part: w is remembered.
    ledger = Ledger()
    slot = ledger.add_slot()
    first = ledger.dispatch(request(), ID, slot, 0.25)
    ledger.dispatch(request(), ID, slot, 8.0)
    ledger.settle(first, Outcome.COMPLETED)
    assert ledger.load[slot] == 8.0


def test_a_burst_of_wildly_different_workloads_leaves_no_residue() -> None:
    # As floats, one e^(θu)-sized load swallows the small ones and leaves them behind, or less
    # than nothing: the same burst with += and -= is off by more than any real load.
    rng = random.Random(3)
    sizes = [10.0**e for e in range(-9, 22)] * 20
    rng.shuffle(sizes)
    ledger = Ledger()
    slot = ledger.add_slot()
    entries = [ledger.dispatch(request(), ID, slot, size) for size in sizes]
    rng.shuffle(entries)
    kept, naive = entries.pop(), sum(sizes)
    for entry in entries:
        ledger.settle(entry, Outcome.COMPLETED)
        naive -= entry.workload
    assert ledger.load[slot] == float(exact_load([kept]))
    assert abs(naive - kept.workload) > 1
    ledger.settle(kept, Outcome.COMPLETED)
    assert ledger.load[slot] == 0.0


def test_the_order_of_settling_changes_nothing() -> None:
    sizes = [1e-9, 3.3, 1e21, 0.1]
    for order in itertools.permutations(range(4)):
        ledger = Ledger()
        slot = ledger.add_slot()
        entries = [ledger.dispatch(request(), ID, slot, size) for size in sizes]
        for i in order[:3]:
            ledger.settle(entries[i], Outcome.COMPLETED)
        assert ledger.load[slot] == float(exact_load([entries[order[3]]]))


def test_a_settlement_that_comes_after_the_removal_touches_no_new_instance() -> None:
    ledger = Ledger()
    slot = ledger.add_slot()
    late = ledger.dispatch(request(), ID, slot, 4.0)
    assert ledger.remove_slot(slot) == [late]
    reused = ledger.add_slot()
    assert reused == slot
    ledger.dispatch(request(), InstanceId("b"), reused, 1.0)
    assert ledger.settle(late, Outcome.COMPLETED) is False
    assert ledger.load[reused] == 1.0
    assert ledger.in_flight[reused] == 1


def test_loads_stay_when_slots_are_added() -> None:
    ledger = Ledger()
    first = ledger.add_slot()
    ledger.dispatch(request(100, 20.0), ID, first, 2.0)
    slots = [ledger.add_slot() for _ in range(100)]
    assert len({first, *slots}) == 101
    assert (ledger.load[first], ledger.kv_tokens[first], ledger.in_flight[first]) == (2.0, 120, 1)
    assert ledger.load.sum() == 2.0


def test_a_request_holds_the_tokens_of_all_its_sequences() -> None:
    assert request(100, 20.0, sequences=3).kv_tokens == 360
    assert request(100, 0.0).kv_tokens == 100
