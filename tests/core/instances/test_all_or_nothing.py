"""An event that fails has changed nothing: neither the sums of loads nor those of progress."""

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import MOST_SEQUENCES, MOST_TOKENS, InstanceId, Outcome
from tests.core.builders import attributes, fast_instance, request, scheduler, spec

ABSURD = (math.nan, math.inf, -math.inf, -1, 1e308, 10**310, "many")
absurd = st.sampled_from(ABSURD)


def everything(state: InstanceState) -> dict[str, Any]:
    """All that a state knows, but for what it shares with its table."""
    known = attributes(state)
    for shared in ("observations", "interval"):
        del known[shared]
    known["observed_clock"] = repr(state.observed_clock)  # which may be no number
    for name in ("stages", "_moves", "_outstanding", "_peer_loads"):
        known[name] = copy.copy(known[name])
    return known


# What goes wrong: a number of the request, of its charge, or the clock.
faults = st.one_of(
    st.tuples(st.sampled_from(("prompt_tokens", "predicted_output_tokens", "sequences")), absurd),
    st.tuples(st.sampled_from(("workload", "kv_tokens", "prefill_tokens")), absurd),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("dispatch"), st.floats(0, 100)),
        st.tuples(st.just("first_token"), st.integers(0, 20)),
        st.tuples(st.just("settle"), st.integers(0, 20)),
        st.tuples(st.just("faulty dispatch"), faults),
        st.tuples(st.just("faulty clock"), st.integers(0, 20)),
        st.tuples(st.just("another's"), st.floats(0, 100)),
    ),
    max_size=40,
)


def faulty_dispatch(state: InstanceState, name: str, value: Any, now_s: float) -> None:
    charge: dict[str, Any] = {"workload": 1.0, "kv_tokens": 768, "prefill_tokens": 512.0}
    body = request()
    if name in charge:
        charge[name] = value
    else:
        body = body.replace(**{name: value})
    state.dispatch(body, charge["workload"], now_s, charge["kv_tokens"], charge["prefill_tokens"])


@given(events)
def test_an_event_that_fails_has_changed_nothing(steps: list[tuple[str, Any]]) -> None:
    state, other = fast_instance(), fast_instance()
    there: list[Dispatch] = []
    now_s = 0.0
    for event, value in steps:
        now_s += 0.1
        if event == "dispatch":
            there.append(state.dispatch(request(), value, now_s))
        elif event == "first_token" and there:
            state.first_token(there[value % len(there)], now_s)
        elif event == "settle" and there:
            assert state.settle(there.pop(value % len(there)), Outcome.COMPLETED, now_s)
        elif event.startswith(("faulty", "another")):
            before = everything(state)
            failed = True
            try:
                if event == "faulty dispatch":
                    faulty_dispatch(state, *value, now_s)
                elif event == "another's":
                    state.settle(other.dispatch(request(), value, now_s), Outcome.COMPLETED, now_s)
                elif there:
                    entry = there[value % len(there)]
                    settles = value % 2 == 0 and entry.streaming
                    if not settles and entry.streaming:
                        continue  # a second first token is none
                    event_of = state.settle if settles else state.first_token
                    arguments = (Outcome.COMPLETED, "soon") if settles else ("soon",)
                    event_of(entry, *arguments)  # type: ignore[operator]
                else:
                    continue
                failed = False
            except (ValueError, TypeError, OverflowError, KeyError):
                assert everything(state) == before
            assert failed, (event, value)
    for entry in there:
        assert state.settle(entry, Outcome.CLIENT_DISCONNECTED, now_s)
    assert (state.load_s, state.kv_tokens, state.in_flight, state.waiting) == (0.0, 0, 0, 0)
    assert (state.streaming, state.context, state.waiting_prompt) == (0, 0.0, 0)


def one_field(name: str, value: float) -> Any:
    fits = value != 10**310 if name == "predicted_output_tokens" else isinstance(value, int)
    mark = pytest.mark.interpreted("what is compiled refuses what is of no int's or float's type")
    return pytest.param(name, value, marks=() if fits else mark)


FIELDS = ("prompt_tokens", "predicted_output_tokens", "sequences")


@pytest.mark.parametrize(("name", "value"), [one_field(n, v) for n in FIELDS for v in ABSURD[:-1]])
def test_a_request_of_absurd_numbers_says_which_one(name: str, value: Any) -> None:
    asked = scheduler(spec("a"))
    with pytest.raises(ValueError, match=f"a request's {name} must be within"):
        asked.place(request().replace(**{name: value}), 0.0)
    assert asked.queued == asked.members.table[InstanceId("a")].in_flight == 0


def test_the_largest_request_that_is_let_in_can_be_charged_and_taken_off() -> None:
    state = fast_instance()
    largest = Request("m", MOST_TOKENS, float(MOST_TOKENS), MOST_SEQUENCES)
    assert largest.what_is_wrong() == ""
    entry = state.dispatch(largest, 1e90, 0.0)
    assert state.first_token(entry, 1.0)
    assert state.settle(entry, Outcome.COMPLETED, 2.0)
    assert (state.load_s, state.kv_tokens, state.context) == (0.0, 0, 0.0)
