"""Blocks that are kept for another engine, or filled by one: missing from the free ones, found."""

import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.sim.engine import Engine, Sequence
from hetero_gateway.sim.pinned_blocks import keys_in, pin

CONSTANTS = Constants(p1=1e-4, p2=2e-4, p3=3e-6, p4=0.01, p5=1e-7, p6=1e-4, p7=3e-7, p8=0.02)
KEYS = [101, 202, 303]
BLOCKS = 10


def make_engine(**rules):
    profile = Profile("GPU", "model", 1, CONSTANTS, BLOCKS * 16, 8)
    return Engine(profile, prefix_caching=True, **rules)


def run(engine):
    while engine.begin_step():
        engine.end_step()


def test_what_a_prefill_has_computed_stays_until_it_is_freed():
    engine = make_engine()
    engine.submit(Sequence(50, 1, list(KEYS)))
    run(engine)
    assert engine.free_blocks == BLOCKS
    pinned = pin(engine, KEYS, 50)
    assert (len(pinned.blocks), pinned.hits, engine.free_blocks) == (4, 3, BLOCKS - 4)
    assert keys_in(engine, pinned.blocks) == [*KEYS, 0]
    assert not engine.reset_prefix_cache()
    # All else is used up by others, and it is still there.
    for key in range(1000, 1100, 10):
        engine.submit(Sequence(90, 1, [key + i for i in range(5)]))
        run(engine)
    blocks = list(pinned.blocks)
    assert keys_in(engine, blocks) == [*KEYS, 0]
    pinned.free()
    pinned.free()
    assert engine.free_blocks == BLOCKS
    engine.submit(Sequence(160, 1, [2000 + i for i in range(10)]))
    run(engine)
    assert not set(KEYS) & set(keys_in(engine, blocks))  # now others have them


def test_a_sequence_finds_what_was_fetched_for_it_and_computes_the_rest_of_a_block():
    engine = make_engine()
    pinned = pin(engine, KEYS, 50)
    assert (pinned.hits, engine.free_blocks) == (0, BLOCKS - 4)
    pinned.keep(KEYS)
    sequence = Sequence(50, 3, list(KEYS))
    engine.submit(sequence)
    pinned.free(3)  # the one that is not full is its own
    step = engine.begin_step()
    assert (step.prefill_tokens, sequence.cached_tokens) == (2, 48)
    pinned.free()
    assert engine.free_blocks == BLOCKS - 4
    engine.end_step()
    run(engine)
    assert engine.free_blocks == BLOCKS
    # A part of it is there the next time.
    assert pin(engine, [*KEYS[:2], 404], 48).hits == 2


def test_what_has_no_room_is_not_pinned_and_changes_nothing():
    engine = make_engine()
    assert pin(engine, KEYS, BLOCKS * 16, spare_blocks=1) is None
    assert pin(engine, KEYS, BLOCKS * 16 + 1) is None
    assert engine.free_blocks == BLOCKS
    assert pin(engine, KEYS, BLOCKS * 16) is not None
    assert engine.free_blocks == 0
    with pytest.raises(ValueError, match="no such block"):
        keys_in(engine, [BLOCKS])
    bare = Engine(Profile("GPU", "model", 1, CONSTANTS, 160, 8))
    with pytest.raises(ValueError, match="no prefix cache"):
        pin(bare, KEYS, 16)
