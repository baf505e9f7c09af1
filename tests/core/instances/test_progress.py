"""The sums per instance are those of its requests, whatever happens and in whatever order."""

import numpy as np
import pytest

from hetero_gateway.core.costs.cost_model import decode_step_time_s
from hetero_gateway.core.instances.dispatch import Dispatch, PeerLoad
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.instances.table import Table
from hetero_gateway.core.lengths.predictors import STAGE_TOKENS, ResidualLives
from hetero_gateway.core.types import InstanceId, Outcome
from tests.core.builders import FAST_CONSTANTS, SLOW_CONSTANTS, request


def progress() -> Table:
    """Two instances, i0 and i1 in slots 0 and 1."""
    table = Table()
    for name, constants in (("i0", FAST_CONSTANTS), ("i1", SLOW_CONSTANTS)):
        table.join(InstanceId(name)).set_constants(constants)
    return table


def at(p: Table, slot: int = 0) -> InstanceState:
    return p[InstanceId(f"i{slot}")]


def context(p: Table, now_s: float, slot: int = 0) -> float:
    """Cached tokens of what streams, as of now."""
    state = at(p, slot)
    return state.context + state.streaming * max(0.0, now_s - state.read_s) * state.steps_per_s


def progress_of(state: InstanceState) -> tuple[float, ...]:
    return state.waiting, state.streaming, state.context


def place(
    p: Table,
    now_s: float = 0.0,
    slot: int = 0,
    prompt: int = 100,
    output: float = 50.0,
    sequences: int = 1,
) -> Dispatch:
    return at(p, slot).dispatch(request(prompt, output, sequences=sequences), 0.0, now_s)


def stream(p: Table, now_s: float, **lengths: int) -> Dispatch:
    d = place(p, **lengths)
    assert d.state.first_token(d, now_s)
    return d


def gone(d: Dispatch, now_s: float) -> bool:
    return d.state.settle(d, Outcome.COMPLETED, now_s)


def test_a_request_waits_then_streams_then_is_gone() -> None:
    p = progress()
    d = place(p, slot=1, prompt=100, output=50.0, sequences=2)
    state = at(p, 1)
    assert (*progress_of(state), state.waiting_prompt, state.waiting_output) == (2, 0, 0, 200, 100)
    assert d.state.first_token(d, 1.0)
    assert (*progress_of(state), state.waiting_prompt) == (0, 2, 202, 0)
    assert state.stages == [2] + [0] * (len(STAGE_TOKENS) - 1)
    gone(d, 2.0)
    assert progress_of(state) == (0, 0, 0)
    assert not any(state.stages)


def test_context_grows_by_one_token_per_stream_and_step() -> None:
    p = progress()
    stream(p, 0.0, prompt=100)
    stream(p, 0.0, prompt=300)
    step_s = decode_step_time_s(FAST_CONSTANTS, 2, 201)
    assert context(p, 10 * step_s) == pytest.approx(402 + 2 * 10, rel=1e-6)


def test_an_observation_sets_the_step_clock() -> None:
    p = progress()
    stream(p, 0.0, prompt=100)
    at(p).observe_steps(1, 0.01, 0.01)
    before = context(p, 0.01)
    at(p).observe_steps(40, 1.0, 1.01)
    assert context(p, 1.01) == pytest.approx(before + 40, rel=1e-9)


def test_the_stage_of_a_stream_follows_its_length() -> None:
    p = progress()
    stream(p, 0.0)
    seen = 1.0
    at(p).observe_steps(1, 0.01, 0.0)
    now_s = 0.0
    for following, stage in zip(STAGE_TOKENS[1:], range(1, len(STAGE_TOKENS)), strict=True):
        steps = following - seen
        now_s += steps * 0.01
        at(p).observe_steps(steps, steps * 0.01, now_s)
        seen = following
        assert at(p).stages[stage] == 1
        assert sum(at(p).stages) == 1


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_the_speed_factor_converges_to_observed_over_modelled(factor: float) -> None:
    p, now_s = progress(), 0.0
    for _ in range(8):
        stream(p, 0.0, prompt=500)
    for _ in range(60):
        context_tokens = context(p, now_s)
        step_s = factor * decode_step_time_s(FAST_CONSTANTS, 8, context_tokens / 8)
        now_s += 30 * step_s
        at(p).observe_steps(30, 30 * step_s, now_s)
    assert at(p, 0).speed == pytest.approx(factor, rel=0.05)
    assert at(p, 1).speed == 1.0


def test_a_prompt_that_kept_no_decode_step_waiting_does_not_count_in_the_speed() -> None:
    p = progress()
    stream(p, 0.0, prompt=5000)
    step_s = decode_step_time_s(FAST_CONSTANTS, 1, 5005)
    at(p).observe_steps(10, 10 * step_s, 10 * step_s)
    assert at(p, 0).speed == pytest.approx(1.0, rel=0.01)


def test_the_speed_factor_has_bounds_and_forgets() -> None:
    p, now_s = progress(), 0.0
    stream(p, 0.0)
    for _ in range(50):
        now_s += 5
        at(p).observe_steps(1, 5.0, now_s)
    assert at(p, 0).speed == 10.0
    for _ in range(50):
        context_tokens = context(p, now_s)
        step_s = decode_step_time_s(FAST_CONSTANTS, 1, context_tokens)
        now_s += 50 * step_s
        at(p).observe_steps(50, 50 * step_s, now_s)
    assert at(p, 0).speed == pytest.approx(1.0, rel=0.05)


def test_an_engine_that_hangs_while_it_streams_is_slow() -> None:
    p = progress()
    stream(p, 0.0)
    for second in range(1, 5):
        at(p).observe_steps(0, 1.0, float(second))
    assert at(p, 0).speed == 10.0


def test_a_slot_is_silent_while_it_owes_a_first_token() -> None:
    p = progress()
    first, second = place(p, 5.0), place(p, 6.0)
    assert at(p).heard_s == 5.0
    first.state.first_token(first, 7.5)
    assert at(p).heard_s == 7.5
    second.state.first_token(second, 8.0)
    assert at(p).heard_s == 8.0


def test_a_slot_that_is_used_again_knows_nothing_of_the_past() -> None:
    p = progress()
    d = stream(p, 0.0)
    at(p).observe_steps(1, 5.0, 5.0)
    gone(d, 6.0)
    p.leave(InstanceId("i0"), 6.0)
    p.join(InstanceId("i0")).set_constants(SLOW_CONSTANTS)
    assert at(p, 0).speed == 1.0
    assert progress_of(at(p)) == (0, 0, 0)


def test_an_unprofiled_slot_counts_and_keeps_its_speed() -> None:
    p = Table()
    p.join(InstanceId("i0")).set_constants(None)
    stream(p, 0.0)
    at(p).observe_steps(10, 1.0, 1.0)
    assert at(p, 0).speed == 1.0
    assert at(p).streaming == 1


def test_the_loads_of_peers_are_added_up_and_go_with_them() -> None:
    p = progress()
    d = stream(p, 0.0, prompt=100)
    there = PeerLoad(2.0, 700, 3, 1, 2, 50, 50.0, 30.0, 600.0)
    at(p).set_peer("other", there)
    at(p).set_peer("third", there)
    peers = at(p).peers
    assert peers is not None
    assert (peers.load_s, peers.kv_tokens, peers.in_flight) == (4.0, 1400, 6)
    assert (peers.waiting, peers.streaming, peers.waiting_prompt) == (2, 4, 100)
    assert (peers.waiting_output, peers.context) == (60, 1200)
    assert at(p, 1).peers == PeerLoad()
    at(p).set_peer("other", PeerLoad())
    at(p).set_peer("third", None)
    assert at(p).peers == PeerLoad()
    assert (at(p).load_s, at(p).in_flight) == (0.0, 1), "what is ours was never changed"
    assert gone(d, 1.0)


def test_a_peers_load_without_a_time_takes_no_clock_back() -> None:
    p = progress()
    # A machine that has been up for weeks.
    at(p).set_peer("other", PeerLoad(prompt_tokens=50.0), 3e6)
    at(p).set_peer("other", PeerLoad(prompt_tokens=80.0), 3e6)
    at(p).set_peer("other", PeerLoad(prompt_tokens=90.0))
    assert (at(p).recent_prefill, at(p).recent_prefill_s) == (40.0, 3e6)


def test_residual_lives_of_a_constant_length_fall_as_it_streams() -> None:
    lives = ResidualLives(prior_tokens=100.0, prior_requests=1e-9)
    for _ in range(64):
        lives.observe("m", 300.0)
    table = lives.of("m").plain
    assert table[0] == pytest.approx(300 - 16)
    assert table[3] == pytest.approx(300 - 192)
    assert lives.of("another").plain == [100.0] * len(STAGE_TOKENS)


def test_residual_lives_of_a_memoryless_length_stay() -> None:
    lives = ResidualLives(prior_tokens=1.0)
    for length in np.random.default_rng(0).exponential(200, 2048):
        lives.observe("m", float(length))
    assert lives.of("m").plain[:5] == pytest.approx(np.full(5, 200), rel=0.25)
