"""Requests whose prompts are computed on one instance and answered by another."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.pairs import Link, between
from hetero_gateway.core.policies.base import Decision
from hetero_gateway.core.policies.legs import RolePrice
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Leg, Outcome, Reject
from tests.core.builders import FAST, SLOW, request, scheduler, spec

P, D = InstanceId("p"), InstanceId("d")
LINK = Link(0.002, 1.25e10)
TOKEN_BYTES = 131072.0
# Prompts had better be computed on P, and answered on D.
ROLES = {P: RolePrice(decode_s=10.0), D: RolePrice(prefill_s=10.0)}


def splitting(*specs: InstanceSpec, link: Link = LINK) -> Scheduler:
    made = scheduler(*specs, policy="finish-time")
    made.legs.set_roles(ROLES, between(specs, link, TOKEN_BYTES))
    return made


def placed(of: Scheduler, now_s: float = 0.0, prompt: int = 1000, output: float = 200.0) -> Ticket:
    ticket = of.place(request(prompt, output), now_s)
    assert isinstance(ticket, Ticket)
    assert ticket.failed is None
    return ticket


def sums(of: Scheduler) -> list[tuple[float, ...]]:
    return [
        (
            *(s.load_s, s.kv_tokens, s.in_flight, s.tracked, s.waiting, s.streaming, s.context),
            *(s.waiting_prompt, s.waiting_prefill, s.waiting_output, sum(s.stages)),
        )
        for s in of.members.table.states.values()
    ]


def test_each_leg_is_charged_for_what_it_does() -> None:
    made = splitting(spec("p"), spec("d"))
    ticket = placed(made)
    prefill, decode = ticket.prefill, ticket.dispatch
    assert prefill is not None
    assert decode is not None
    assert (prefill.instance_id, prefill.leg) == (P, Leg.PREFILL)
    assert (decode.instance_id, decode.leg) == (D, Leg.DECODE)
    assert (prefill.kv_tokens, prefill.prefill_tokens, prefill.output_tokens) == (1000, 1000, 0)
    assert (decode.kv_tokens, decode.prefill_tokens, decode.output_tokens) == (1200, 0, 200)
    assert ticket.decision is not None
    alone = scheduler(spec("p"), policy="finish-time")
    whole = placed(alone).dispatch
    assert whole is not None
    assert prefill.workload + decode.workload == pytest.approx(whole.workload, rel=0.01)


def test_a_pair_pays_for_the_server_of_its_second_instance() -> None:
    slow_server = dataclasses.replace(FAST, first_token_s=0.5)
    plain, later = (
        placed(splitting(spec("p", profile), spec("d", profile))) for profile in (FAST, slow_server)
    )
    assert plain.prefill is not None
    assert later.prefill is not None
    assert plain.dispatch is not None
    assert later.dispatch is not None
    assert later.prefill.expected_s == pytest.approx(plain.prefill.expected_s + 0.5)
    assert later.dispatch.expected_s == pytest.approx(plain.dispatch.expected_s + 1.0)
    # Where no roles ask for it, that is more than splitting is worth.
    made = scheduler(spec("p", slow_server), spec("d", slow_server), policy="finish-time")
    made.legs.set_roles({}, between([spec("p"), spec("d")], LINK, TOKEN_BYTES))
    assert placed(made).prefill is None


def test_a_computed_prompt_holds_memory_and_nothing_else() -> None:
    made = splitting(spec("p"), spec("d"))
    ticket = placed(made)
    state = made.members.table[P]
    assert ticket.prefill is not None
    assert ticket.dispatch is not None
    made.legs.prefilled(ticket.prefill, 0.1)
    made.legs.prefilled(ticket.prefill, 0.2)
    assert (state.waiting, state.waiting_prefill, state.waiting_prompt) == (0, 0.0, 1000)
    assert (state.kv_tokens, state.in_flight, state.streaming) == (1000, 1, 0)
    made.first_token(ticket.dispatch, 0.2)
    assert made.settle(ticket.prefill, Outcome.COMPLETED, 0.2)
    assert not made.settle(ticket.prefill, Outcome.COMPLETED, 0.3)
    assert made.settle(ticket.dispatch, Outcome.COMPLETED, 5.0)
    assert all(not any(one) for one in sums(made))


def test_an_answer_is_expected_from_when_it_is_asked_for() -> None:
    made = splitting(spec("p"), spec("d"))
    ticket = placed(made)
    prefill, decode = ticket.prefill, ticket.dispatch
    assert prefill is not None
    assert decode is not None
    assert decode.sent_s == math.inf
    whole_s = decode.expected_s
    made.legs.prefilled(prefill, 3.0)
    made.legs.asked(prefill, decode, 3.0)
    assert decode.sent_s == 3.0
    assert decode.expected_s == whole_s - prefill.expected_s > 0


def test_what_is_handed_over_is_no_prompt_among_decode_steps() -> None:
    # Or else the observed steps would seem to have computed it in no time.
    made = splitting(spec("p"), spec("d"))
    state = made.members.table[D]
    for k in range(4):
        ticket = placed(made, k)
        assert ticket.dispatch is not None
        assert ticket.prefill is not None
        made.first_token(ticket.dispatch, k + 0.5)
    assert (state.streaming, state.interval.prompts, state.interval.prompt_tokens) == (4, 0, 0)


def test_nothing_is_split_without_pairs_or_while_roles_say_so() -> None:
    made = splitting(spec("p"), spec("d"))
    made.legs.set_roles(None)
    assert placed(made).prefill is None
    made.legs.set_roles(ROLES, models=frozenset(("other",)))
    assert placed(made).prefill is None
    made.legs.set_roles(ROLES, models=frozenset((request(1, 1.0).model,)))
    assert placed(made).prefill is not None
    made.legs.set_roles(ROLES, between([], LINK, TOKEN_BYTES))
    assert placed(made).prefill is None


def test_a_slow_link_splits_nothing() -> None:
    made = splitting(spec("p"), spec("d"), link=Link(0.002, 1e6))
    made.legs.set_roles({})
    assert all(placed(made, k).prefill is None for k in range(8))


def test_a_pair_that_refused_is_not_asked_again() -> None:
    made = scheduler(spec("p"), spec("d"), policy="finish-time")
    pairs = between([spec("p"), spec("d")], LINK, TOKEN_BYTES)
    made.legs.set_roles(ROLES, pairs)
    assert placed(made).prefill is not None
    pairs.refuse(P, D, 1.0)
    pairs.refuse(D, P, 1.0)
    assert placed(made, 2.0).prefill is None


def test_explaining_names_both_and_changes_nothing() -> None:
    made = splitting(spec("p"), spec("d"))
    before = sums(made)
    decision = made.explain(request(1000, 200.0))
    assert isinstance(decision, Decision)
    assert (decision.prefill_id, decision.instance_id) == (P, D)
    assert "p computes the prompt" in decision.reason()
    assert sums(made) == before
    ticket = placed(made)
    assert ticket.decision is not None
    assert ticket.decision.prefill_id == P


@pytest.mark.parametrize("seed", range(8))
def test_the_pair_is_the_cheapest_of_all(seed: int) -> None:
    """Pruned, or each looked at."""
    rng = np.random.default_rng(seed)
    specs = [spec(f"i{k}", FAST if rng.random() < 0.5 else SLOW) for k in range(6)]
    made = scheduler(*specs, policy="finish-time")
    pairs = between(specs, LINK, TOKEN_BYTES)
    made.legs.set_roles({}, pairs)
    split = 0
    for k in range(60):
        now_s = 0.05 * k
        decision = made.explain(request(int(rng.integers(10, 4000)), 300.0), now_s)
        assert isinstance(decision, Decision)
        choice, figures = decision.choice, decision.choice.figures
        if choice.prefill_position >= 0:
            split += 1
            prefills, decodes = figures.column("prefill_cost_s"), figures.column("decode_cost_s")
            ttfts = figures.column("ttft_s")
            found = prefills[choice.prefill_position] + decodes[choice.position] + choice.transfer_s
            for i, j in itertools.permutations(range(6), 2):
                tokens = decision.request.prompt_tokens
                transfer_s = pairs.transfer_s(decision.ids[i], decision.ids[j], tokens, now_s)
                if figures.at("room", i) and max(ttfts) < 0.4:  # else first tokens have prices
                    assert prefills[i] + decodes[j] + transfer_s >= found - 1e-9
        placed(made, now_s, decision.request.prompt_tokens, 300.0)
    assert split > 5


class LegsMachine(RuleBasedStateMachine):
    """Legs that come to their end in any order, on instances that come and go."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.specs = [spec("p"), spec("d"), spec("x", SLOW)]
        self.made = splitting(*self.specs)
        self.out: set[Dispatch] = set()
        self.now_s = 0.0

    @rule(target=tickets, prompt=st.integers(1, 8000), output=st.floats(0, 900))
    def place(self, prompt: int, output: float) -> Ticket | None:
        ticket = self.made.place(request(prompt, output), self.now_s)
        if isinstance(ticket, Reject):
            return None
        assert ticket.failed is None
        if ticket.waits:
            self.made.cancel(ticket)
        legs = [leg for leg in (ticket.prefill, ticket.dispatch) if leg is not None]
        self.out.update(legs)
        return ticket

    @rule(ticket=tickets, wait_s=st.floats(0, 1))
    def prefilled(self, ticket: Ticket | None, wait_s: float) -> None:
        self.now_s += wait_s
        if ticket is not None and ticket.prefill is not None:
            self.made.legs.prefilled(ticket.prefill, self.now_s)

    @rule(ticket=tickets)
    def first_token(self, ticket: Ticket | None) -> None:
        if ticket is not None and ticket.dispatch is not None:
            self.made.first_token(ticket.dispatch, self.now_s)

    @rule(ticket=tickets, outcome=st.sampled_from(Outcome), which=st.booleans())
    def settle(self, ticket: Ticket | None, outcome: Outcome, which: bool) -> None:
        if ticket is None:
            return
        leg = ticket.prefill if which else ticket.dispatch
        if leg is not None:
            assert self.made.settle(leg, outcome, self.now_s) is (leg in self.out)
            self.out.discard(leg)

    @rule(ticket=consumes(tickets))
    def settle_both(self, ticket: Ticket | None) -> None:
        self.settle(ticket, Outcome.CLIENT_DISCONNECTED, True)
        self.settle(ticket, Outcome.CLIENT_DISCONNECTED, False)

    @rule(which=st.integers(0, 2))
    def leave_and_join(self, which: int) -> None:
        one = self.specs[which]
        orphans = self.made.remove(one.instance_id, self.now_s)
        assert {d for d in self.out if d.instance_id == one.instance_id} == set(orphans)
        self.out -= set(orphans)
        self.made.add(one)

    @rule(steps=st.integers(0, 30))
    def observe(self, steps: int) -> None:
        self.now_s += 0.3
        for one in self.specs:
            self.made.members.observe_steps(one.instance_id, steps, 0.3, self.now_s)

    @invariant()
    def sums_are_of_what_is_outstanding(self) -> None:
        for state in self.made.members.table.states.values():
            there = [d for d in self.out if d.instance_id == state.instance_id]
            waiting = [d for d in there if not d.streaming and not d.pinned]
            assert state.in_flight == len(there)
            assert state.kv_tokens == sum(d.kv_tokens for d in there)
            assert state.waiting == sum(d.request.sequences for d in waiting)
            assert state.waiting_prompt == sum(d.prompt_tokens for d in there if not d.streaming)
            assert state.waiting_prefill == pytest.approx(sum(d.prefill_tokens for d in waiting))
            assert all(math.isfinite(one) for one in (state.load_s, state.context))

    def teardown(self) -> None:
        for leg in self.out:
            assert self.made.settle(leg, Outcome.COMPLETED, self.now_s)
        assert all(not any(one) for one in sums(self.made))


LegsMachine.TestCase.settings = settings(
    deadline=None, derandomize=True, max_examples=30, stateful_step_count=30
)
TestLegsAsAStateMachine = LegsMachine.TestCase
