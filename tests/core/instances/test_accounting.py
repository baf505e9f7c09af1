"""What is outstanding, as a state machine against exact arithmetic, and its rules one by one."""

import itertools
import math
import random
from fractions import Fraction

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

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.instances.table import Table
from hetero_gateway.core.types import InstanceId, Outcome
from tests.core.builders import FAST_CONSTANTS, request

UNIT_S = Fraction(1, 2**40)

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


def instance() -> InstanceState:
    return Table().join(InstanceId("a"))


def sums(state: InstanceState) -> tuple[float, int, int]:
    return state.load_s, state.kv_tokens, state.in_flight


class AccountingMachine(RuleBasedStateMachine):
    """Any order of events, settlements repeated, and instances that come and go."""

    instances = Bundle("instances")
    dispatches = Bundle("dispatches")

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.names = itertools.count()
        self.outstanding: dict[InstanceId, list[Dispatch]] = {}
        self.settled: list[Dispatch] = []
        self.now_s = 0.0

    @rule(target=instances)
    def join(self) -> InstanceId:
        instance_id = InstanceId(f"i{next(self.names)}")
        self.table.join(instance_id).set_constants(FAST_CONSTANTS)
        self.outstanding[instance_id] = []
        return instance_id

    @rule(instance_id=consumes(instances))
    def leave(self, instance_id: InstanceId) -> None:
        expected = self.outstanding.pop(instance_id)
        state = self.table[instance_id]
        orphans = self.table.leave(instance_id, self.now_s)
        assert set(orphans) == set(expected)
        assert all(d.outcome is Outcome.INSTANCE_REMOVED for d in orphans)
        assert sums(state) == (0.0, 0, 0)
        self.settled += orphans

    @rule(
        target=dispatches,
        instance_id=instances,
        workload=workloads,
        prompt_tokens=st.integers(1, 100_000),
        output_tokens=st.floats(0, 5000),
        sequences=st.integers(1, 8),
    )
    def dispatch(
        self,
        instance_id: InstanceId,
        workload: float,
        prompt_tokens: int,
        output_tokens: float,
        sequences: int,
    ) -> Dispatch:
        body = request(prompt_tokens, output_tokens, sequences=sequences)
        entry = self.table[instance_id].dispatch(body, workload, self.now_s)
        self.outstanding[instance_id].append(entry)
        return entry

    @rule(
        target=dispatches, instance_id=instances, sizes=st.lists(workloads, min_size=2, max_size=30)
    )
    def burst(self, instance_id: InstanceId, sizes: list[float]) -> object:
        return multiple(*(self.dispatch(instance_id, size, 100, 100.0, 1) for size in sizes))

    @rule(instance_id=instances, steps=st.integers(0, 30), wait_s=st.floats(0, 2))
    def observe(self, instance_id: InstanceId, steps: int, wait_s: float) -> None:
        self.now_s += wait_s
        self.table[instance_id].observe_steps(steps, 0.1 + wait_s, self.now_s)

    @rule(entry=dispatches)
    def first_token(self, entry: Dispatch) -> None:
        expected = entry.outcome is None and not entry.streaming
        assert entry.state.first_token(entry, self.now_s) is expected

    @rule(entry=consumes(dispatches), outcome=outcomes)
    def settle(self, entry: Dispatch, outcome: Outcome) -> None:
        there = self.outstanding.get(entry.instance_id, [])
        was_outstanding = any(d is entry for d in there)
        assert entry.state.settle(entry, outcome, self.now_s) is was_outstanding
        if was_outstanding:
            assert entry.outcome is outcome
            there.remove(entry)
            self.settled.append(entry)

    @precondition(lambda self: self.settled)
    @rule(data=st.data(), outcome=outcomes)
    def settle_again(self, data: st.DataObject, outcome: Outcome) -> None:
        entry = data.draw(st.sampled_from(self.settled))
        before = (entry.outcome, sums(entry.state))
        assert entry.state.settle(entry, outcome, self.now_s) is False
        assert entry.state.first_token(entry, self.now_s) is False
        assert (entry.outcome, sums(entry.state)) == before

    @rule(instance_id=instances)
    def settle_all(self, instance_id: InstanceId) -> None:
        for entry in self.outstanding[instance_id]:
            assert entry.state.settle(entry, Outcome.COMPLETED, self.now_s)
        self.settled += self.outstanding[instance_id]
        self.outstanding[instance_id] = []

    @invariant()
    def every_sum_is_exactly_what_is_outstanding(self) -> None:
        for instance_id, entries in self.outstanding.items():
            state = self.table[instance_id]
            assert state.load_s == float(exact_load(entries))
            assert state.kv_tokens == sum(d.request.kv_tokens for d in entries)
            assert state.in_flight == len(entries)
            assert state.outstanding() == set(entries)
            waiting = [d for d in entries if not d.streaming]
            assert state.waiting == sum(d.request.sequences for d in waiting)
            assert state.waiting_prompt == sum(d.prompt_tokens for d in waiting)
            assert state.streaming == sum(d.request.sequences for d in entries if d.streaming)
            assert sum(state.stages) == state.streaming
            assert min(state.stages) >= 0
            assert 0.1 <= state.speed <= 10

    @invariant()
    def nothing_is_negative_and_empty_is_exactly_zero(self) -> None:
        for instance_id, entries in self.outstanding.items():
            state = self.table[instance_id]
            assert min(sums(state)) >= 0
            if not entries:
                assert sums(state) == (0.0, 0, 0)
                assert math.copysign(1, state.load_s) == 1
                assert (state.waiting_output, state.context) == (0.0, 0.0)


AccountingMachine.TestCase.settings = settings(
    deadline=None, derandomize=True, max_examples=40, stateful_step_count=40
)
TestAccountingAsAStateMachine = AccountingMachine.TestCase


def test_a_dispatch_is_charged_what_its_demand_was() -> None:
    # Half of the prompt is in the prefix cache: it is not computed, but it is held.
    state = instance()
    entry = state.dispatch(request(100, 50.0), 1.0, 0.0, 150, 50.0)
    state.dispatch(request(10, 5.0), 1.0, 0.0)
    assert (state.waiting_prompt, state.waiting_prefill, state.kv_tokens) == (110, 60.0, 165)
    state.first_token(entry, 0.0)
    assert (state.waiting_prefill, state.context) == (10.0, 101)
    state.settle(entry, Outcome.COMPLETED, 0.0)
    assert (state.waiting_prefill, state.kv_tokens) == (10.0, 15)


def test_a_burst_of_wildly_different_workloads_leaves_no_residue() -> None:
    # As floats, one e^(θu)-sized load swallows the small ones and leaves them behind, or less
    # than nothing: the same burst with += and -= is off by more than any real load.
    rng = random.Random(3)
    sizes = [10.0**e for e in range(-9, 22)] * 20
    rng.shuffle(sizes)
    state = instance()
    entries = [state.dispatch(request(), size, 0.0) for size in sizes]
    rng.shuffle(entries)
    kept, naive = entries.pop(), sum(sizes)
    for entry in entries:
        state.settle(entry, Outcome.COMPLETED, 0.0)
        naive -= entry.workload
    assert state.load_s == float(exact_load([kept]))
    assert abs(naive - kept.workload) > 1
    state.settle(kept, Outcome.COMPLETED, 0.0)
    assert state.load_s == 0.0


def test_a_settlement_that_comes_after_the_removal_touches_no_new_instance() -> None:
    table = Table()
    old = table.join(InstanceId("a"))
    late = old.dispatch(request(), 4.0, 0.0)
    assert table.leave(InstanceId("a"), 0.0) == [late]
    new = table.join(InstanceId("b"))
    assert new.slot == old.slot
    new.dispatch(request(), 1.0, 0.0)
    assert late.state.settle(late, Outcome.COMPLETED, 0.0) is False
    assert sums(new)[::2] == (1.0, 1)


def test_loads_stay_when_instances_join() -> None:
    table = Table()
    first = table.join(InstanceId("first"))
    first.dispatch(request(100, 20.0), 2.0, 0.0)
    slots = {table.join(InstanceId(f"i{i}")).slot for i in range(100)}
    assert len({first.slot, *slots}) == 101
    assert sums(first) == (2.0, 120, 1)
    assert sum(state.load_s for state in table.states.values()) == 2.0


def test_a_request_holds_the_tokens_of_all_its_sequences() -> None:
    assert request(100, 20.0, sequences=3).kv_tokens == 360
    assert request(100, 0.0).kv_tokens == 100
