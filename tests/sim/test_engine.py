"""The engine step: what is conserved, what a step costs, and who waits for whom."""

import dataclasses
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.costs.cost_model import decode_step_time_s, decode_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.sim import kernel
from hetero_gateway.sim.engine import Engine, Scheduling, Sequence

CONSTANTS = Constants(p1=1e-4, p2=2e-4, p3=3e-6, p4=0.01, p5=1e-7, p6=1e-4, p7=3e-7, p8=0.02)
BOTH: list[Scheduling] = ["chunked", "prefill-first"]


def make_engine(kv_tokens=10_000, max_num_seqs=64, constants=None, **options):
    profile = Profile("GPU", "model", 1, constants or CONSTANTS, kv_tokens, max_num_seqs)
    return Engine(profile, **options)


def submit(engine, *lengths):
    sequences = [Sequence(prompt, output) for prompt, output in lengths]
    for sequence in sequences:
        engine.submit(sequence)
    return sequences


def run(engine, limit=100_000):
    """Every (step, result) until the engine is idle."""
    history = []
    while step := engine.begin_step():
        history.append((step, engine.end_step()))
        assert len(history) < limit, "the engine makes no progress"
    return history


def one_step(engine):
    """The next step, ended."""
    step = engine.begin_step()
    engine.end_step()
    return step


def emissions(history):
    return Counter(sequence for _, result in history for sequence in result.emitted)


ATTENTIVE = dataclasses.replace(CONSTANTS, p9=1e-7)


@pytest.mark.parametrize("constants", [CONSTANTS, ATTENTIVE], ids=["plain", "attentive"])
@pytest.mark.parametrize("scheduling", BOTH)
def test_a_static_batch_costs_what_equations_3_and_4_say(scheduling, constants):
    engine = make_engine(100_000, constants=constants, scheduling=scheduling)
    assert engine.begin_step() is None
    submit(engine, *[(100, 51)] * 8)
    (prefill, first), *decodes = run(engine)
    assert len(first.emitted) == 8
    assert prefill.duration_s == pytest.approx(prefill_time_s(constants, 8, 100), rel=1e-12)
    # The prefill emits token 1, so 51 tokens take 50 decode steps: Eq. (4) with O - 1.
    assert len(decodes) == 50
    assert sum(step.duration_s for step, _ in decodes) == pytest.approx(
        decode_time_s(constants, 8, 100, 50), rel=1e-12
    )


def test_a_prompt_in_chunks_pays_the_same_attention_as_in_one_piece():
    took = {}
    for c in (CONSTANTS, ATTENTIVE):
        for budget in (500, 4096):
            engine = make_engine(constants=c, max_batched_tokens=budget)
            submit(engine, (3000, 1))
            steps = [step.duration_s for step, _ in run(engine)]
            assert len(steps) == (6 if budget == 500 else 1)
            took[c.p9, budget] = sum(steps)
            if c.p9 and budget == 500:
                # Each chunk of 500 attends to 500 more for each of its tokens.
                gaps = [later - sooner for sooner, later in itertools.pairwise(steps)]
                assert gaps == pytest.approx([1e-7 * 500 * 500] * 5)
    for budget in (500, 4096):
        assert took[1e-7, budget] - took[0.0, budget] == pytest.approx(1e-7 * 3000**2 / 2)


def test_a_prompt_behind_a_cached_one_attends_to_it():
    engine = make_engine(constants=ATTENTIVE, prefix_caching=True, max_batched_tokens=4096)
    keys = [k * 7919 for k in range(1, 126)]  # 125 blocks of 16: 2000 tokens
    engine.submit(Sequence(2000, 1, keys))
    run(engine)
    sequence = Sequence(2300, 1, keys)
    engine.submit(sequence)
    ((step, _),) = run(engine)
    assert sequence.cached_tokens == 2000
    assert step.prefill_tokens == 300
    assert step.duration_s == pytest.approx(prefill_time_s(ATTENTIVE, 1, 300, 2000), rel=1e-12)


def test_a_mixed_step_pays_one_fixed_part():
    engine = make_engine()
    submit(engine, (40, 10))
    one_step(engine)
    submit(engine, (100, 10))
    step = engine.begin_step()
    assert (step.prefill_tokens, step.decode_sequences, step.cached_tokens) == (100, 1, 41)
    expected = (
        prefill_time_s(CONSTANTS, 1, 100)
        + decode_step_time_s(CONSTANTS, 1, 41)
        - min(CONSTANTS.p4, CONSTANTS.p8)
    )
    assert step.duration_s == pytest.approx(expected, rel=1e-12)


def test_a_slowdown_stretches_every_step():
    plain, slow = make_engine(), make_engine(slowdown=3.0)
    for engine in (plain, slow):
        submit(engine, (30, 5))
    for (fast_step, _), (slow_step, _) in zip(run(plain), run(slow), strict=True):
        assert slow_step.duration_s == pytest.approx(3 * fast_step.duration_s)


def test_a_chunked_prompt_spreads_over_steps_and_decodes_go_first():
    engine = make_engine(max_batched_tokens=64)
    (short,) = submit(engine, (10, 50))
    one_step(engine)
    (long,) = submit(engine, (150, 2))
    shares = []
    while long.state != kernel.DONE:
        step = engine.begin_step()
        shares.append((step.decode_sequences, step.prefill_tokens))
        assert short in engine.end_step().emitted
    assert shares == [(1, 63), (1, 63), (1, 24), (2, 0)]


def test_prefill_first_lets_nothing_decode_while_a_prompt_can_be_admitted():
    engine = make_engine(scheduling="prefill-first", max_batched_tokens=100)
    submit(engine, (10, 50))
    one_step(engine)
    submit(engine, (60, 2), (60, 2), (300, 2))
    steps = [one_step(engine) for _ in range(4)]
    kinds = [(step.prefill_tokens, step.decode_sequences) for step in steps]
    # 60 + 60 exceed the budget, and a prompt above it is prefilled alone.
    assert kinds == [(60, 0), (60, 0), (300, 0), (0, 4)]


@pytest.mark.parametrize("scheduling", BOTH)
def test_first_come_first_served(scheduling):
    engine = make_engine(max_num_seqs=3, scheduling=scheduling)
    sequences = submit(engine, *[(20 + i, 4) for i in range(12)])
    first_seen: list[Sequence] = []
    for _, result in run(engine):
        first_seen += [s for s in result.emitted if s not in first_seen]
    assert first_seen == sequences


def test_the_head_of_the_queue_blocks_smaller_requests_behind_it():
    engine = make_engine(kv_tokens=160)
    submit(engine, (80, 20))
    engine.begin_step()
    _, small = submit(engine, (100, 2), (4, 2))
    engine.end_step()
    engine.begin_step()
    assert (small.state, engine.num_running) == (kernel.WAITING, 1)


@pytest.mark.parametrize("scheduling", BOTH)
def test_kv_pressure_evicts_the_newest_which_still_finishes_exactly(scheduling):
    engine = make_engine(kv_tokens=320, scheduling=scheduling)
    sequences = submit(engine, (60, 100), (60, 100), (60, 100))
    history = run(engine)
    assert engine.preemptions_total > 0
    assert sequences[0].preemptions == 0
    assert emissions(history) == dict.fromkeys(sequences, 100)
    assert engine.preemptions_total == sum(len(step.preempted) for step, _ in history)
    assert engine.free_blocks == engine.total_blocks


def test_an_evicted_sequence_is_prefilled_again_with_its_tokens():
    engine = make_engine(kv_tokens=160)
    _, newest = submit(engine, (60, 90), (60, 60))
    while not (step := engine.begin_step()).preempted:
        engine.end_step()
    assert step.preempted == (newest,)
    kept = engine.generated_tokens(newest)
    assert kept > 0
    assert newest.prefill_tokens == 60 + kept
    engine.end_step()
    while newest.state == kernel.WAITING:
        step = engine.begin_step()
        if not step.prefill_tokens:
            engine.end_step()
    assert step.prefill_tokens == 60 + kept
    engine.end_step()
    assert engine.generated_tokens(newest) == kept + 1
    # Recomputed tokens are neither prompt tokens nor generated ones.
    run(engine)
    assert (engine.prompt_tokens_total, engine.generation_tokens_total) == (120, 150)


@pytest.mark.parametrize("steps_before", [0, 1, 5])
@pytest.mark.parametrize("within_a_step", [False, True])
def test_abort_frees_blocks_at_once(steps_before, within_a_step):
    engine = make_engine()
    kept, dropped = submit(engine, (31, 40), (33, 40))
    for _ in range(steps_before):
        one_step(engine)
    if within_a_step:
        engine.begin_step()
    engine.abort(dropped)
    if within_a_step:
        assert dropped not in engine.end_step().emitted
    tokens = kept.prompt_tokens + engine.generated_tokens(kept)
    if engine.num_running:
        assert engine.total_blocks - engine.free_blocks == -(-(tokens - 1) // 16)
    engine.abort(dropped)  # a second time does nothing
    assert emissions(run(engine))[kept] == 40 - steps_before - within_a_step
    assert engine.kv_usage == 0.0


def test_a_sequence_larger_than_the_cache_is_refused():
    engine = make_engine(kv_tokens=64)
    with pytest.raises(ValueError, match="do not fit"):
        engine.submit(Sequence(60, 6))
    engine.submit(Sequence(60, 5))  # the last token needs no KV
    assert len(run(engine)) == 5


def test_misuse_is_refused():
    engine = make_engine()
    (sequence,) = submit(engine, (5, 5))
    with pytest.raises(ValueError, match="submitted before"):
        engine.submit(sequence)
    with pytest.raises(RuntimeError, match="no step"):
        engine.end_step()
    engine.begin_step()
    with pytest.raises(RuntimeError, match="end_step"):
        engine.begin_step()
    with pytest.raises(ValueError, match="at least 1"):
        Sequence(0, 5)
    with pytest.raises(ValueError, match="max_num_seqs"):
        make_engine(max_num_seqs=64, max_batched_tokens=32)


def check_books(engine: Engine[Sequence], everyone: list[Sequence], growing: bool) -> None:
    """The incremental sums against the same sums made from scratch."""
    used = cached = 0
    for sequence in everyone:
        if sequence.state == kernel.PREFILLING:
            used += -(-sequence.prefill_tokens // 16)
        elif sequence.state == kernel.DECODING:
            tokens = sequence.prompt_tokens + engine.generated_tokens(sequence)
            cached += tokens
            used += -(-(tokens if growing else tokens - 1) // 16)
    assert engine.total_blocks - engine.free_blocks == used
    assert engine._row[kernel.CACHED] == cached
    assert 0 <= engine.free_blocks <= engine.total_blocks
    assert engine.num_running <= engine.max_num_seqs


lengths = st.lists(st.tuples(st.integers(1, 120), st.integers(1, 60)), min_size=1, max_size=14)


@given(
    arrivals=lengths,
    scheduling=st.sampled_from(BOTH),
    kv_tokens=st.integers(180, 600),
    max_num_seqs=st.integers(1, 8),
    events=st.lists(st.sampled_from(["step", "step", "submit", "abort"]), max_size=60),
    data=st.data(),
)
def test_tokens_and_blocks_are_conserved(
    arrivals, scheduling, kv_tokens, max_num_seqs, events, data
):
    engine = make_engine(kv_tokens, max_num_seqs, scheduling=scheduling, max_batched_tokens=48)
    everyone = [Sequence(*pair) for pair in arrivals]
    todo = list(everyone)
    aborted: set[Sequence] = set()
    counts = dict.fromkeys(everyone, 0)

    def end_step() -> None:
        for sequence in engine.end_step().emitted:
            counts[sequence] += 1
            assert counts[sequence] == engine.generated_tokens(sequence)

    def abort_any() -> None:
        victim = data.draw(st.sampled_from(everyone))
        if victim.state not in (kernel.NEW, kernel.DONE):
            aborted.add(victim)
            engine.abort(victim)

    for event in events:
        if event == "submit" and todo:
            engine.submit(todo.pop(0))
        elif event == "abort":
            abort_any()
        elif event == "step" and (step := engine.begin_step()):
            assert step.duration_s > 0
            check_books(engine, everyone, growing=step.decode_sequences > 0)
            if data.draw(st.booleans()):
                abort_any()
            end_step()
        check_books(engine, everyone, growing=False)
    for sequence in todo:
        engine.submit(sequence)
    for _ in range(20_000):
        if engine.begin_step() is None:
            break
        end_step()
    for sequence in everyone:
        assert sequence.state == kernel.DONE
        if sequence not in aborted:
            assert counts[sequence] == sequence.output_tokens
    assert engine.free_blocks == engine.total_blocks
    assert engine.generation_tokens_total == sum(counts.values())
