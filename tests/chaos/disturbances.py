"""What happens to the instances and the gateway during a run, drawn ahead from a seed."""

import random
from dataclasses import dataclass

from tests.chaos.faults import KINDS

# By weight. "restart": kill -9, and back after a while; "stop": SIGSTOP, and SIGCONT.
_KINDS = {"restart": 4, "stop": 4, "pages": 2, "reload": 3} | dict.fromkeys(KINDS, 1)
# Between two disturbances, s, on average.
_EVERY_S = 0.6
# At the end of a run all is well again for a while.
CALM_S = 3.0


@dataclass(frozen=True, slots=True)
class Disturbance:
    """``instance`` is a number; ``share`` of its requests get the fault, for ``duration_s``."""

    at_s: float
    kind: str
    instance: int
    duration_s: float
    share: float


def draw_disturbances(seed: int, seconds: float, instances: int) -> list[Disturbance]:
    """In the order of their times. Half of the instances are left alone at any time."""
    rng = random.Random(seed)
    kinds, weights = list(_KINDS), list(_KINDS.values())
    drawn: list[Disturbance] = []
    at_s = 0.5
    while at_s < seconds - CALM_S:
        duration_s = min(rng.choice((0.3, 1.0, 2.0, 4.0, 8.0)), seconds - CALM_S - at_s)
        kind = rng.choices(kinds, weights)[0]
        disturbed = {
            each.instance
            for each in drawn
            if each.kind != "reload" and each.at_s + each.duration_s > at_s
        }
        free = sorted(set(range(instances)) - disturbed)
        if len(disturbed) < max(1, instances // 2):
            drawn.append(
                Disturbance(at_s, kind, rng.choice(free), duration_s, rng.choice((0.2, 1.0)))
            )
        at_s += rng.expovariate(1 / _EVERY_S)
    return drawn
