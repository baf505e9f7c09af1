"""What the learnt residual is judged by: both ways learn what is there to be learnt."""

import numpy as np
import pytest

from benchmarks.simulator.residual import WAYS, Table


@pytest.mark.parametrize("way", WAYS)
def test_what_depends_on_what_is_known_is_learnt(way: str) -> None:
    rng = np.random.default_rng(0)
    known = rng.uniform(0, 100, (2000, 8))
    table = Table(known, 0.3 + 0.004 * known[:, 0])
    judged = table.half(1)
    learnt = WAYS[way](table.half(0), judged.known)
    assert judged.error() > 0.3
    assert judged.error(learnt) < 0.3 * judged.error()


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_is_not(way: str) -> None:
    rng = np.random.default_rng(1)
    table = Table(rng.uniform(0, 100, (2000, 8)), rng.normal(0, 0.1, 2000))
    judged = table.half(1)
    assert judged.error(WAYS[way](table.half(0), judged.known)) > 0.9 * judged.error()
