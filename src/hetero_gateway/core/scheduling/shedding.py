"""Who is refused because he would wait too long, rather than let in to wait in vain. Pure.

A wait is predicted from how fast requests leave a queue that is never empty meanwhile, and from how
many are in front by the discipline: all that wait where it has one row; where it has several, those
of the same row, as often as the row's turn comes, and what the row was given in advance. Before
anything has left, the cost model says how fast that is.

Where the queue sets no limit, the goal for the first token is one, less what lies between a wait's
end and that token: as predicted of those that were placed lately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from hetero_gateway.core.policies.slo import Slos
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.queue import ModelQueue
from hetero_gateway.core.types import BATCH_CLASS

# Predictions are of seats that get free by chance: who is let in is to be within the limit.
MARGIN: Final = 0.75
# What is said of fewer departures is chance.
_LEAST_DEPARTURES: Final = 4


class WaitLimits(NamedTuple):
    """The longest wait of requests that are let in, s; inf: any.

    A request is refused whose predicted wait is above ``MARGIN`` of it. Batches are refused first:
    of what is not said of them, they get half.

    Args:
        most_s: of classes that are not among ``classes``.
        classes: by name.
        slos: where neither sets a limit, what their requests' first tokens should be within; None:
            nothing.
    """

    most_s: float = math.inf
    classes: Mapping[str, float] = {}
    slos: Slos | None = None

    def of(self, request: Request, first_token_s: float) -> float:
        """The longest wait of a request whose first token comes so long after its wait, s."""
        name = request.request_class
        most_s = self.classes.get(name)
        if most_s is not None:
            return most_s
        most_s, halved = self.most_s, name == BATCH_CLASS
        if most_s == math.inf and self.slos is not None:
            most_s = self.slos.of(request).ttft_s
            halved = halved and not self.slos.has_class(name)
            most_s = max(0.0, most_s - first_token_s)
        return most_s / 2 if halved else most_s

    @property
    def any(self) -> bool:
        return self.slos is not None or min((self.most_s, *self.classes.values())) < math.inf


def predicted_wait_s(queue: ModelQueue, request: Request, drain_s: float, now_s: float) -> float:
    """How long a request that comes now would wait.

    Args:
        queue: of its model; somebody waits there.
        drain_s: how long the cost model takes all of it to last.
    """
    gap_s = drain_s / len(queue)
    if queue.departures >= _LEAST_DEPARTURES:
        # Longer than the mean where nothing has left for longer.
        gap_s = max(queue.mean_departure_gap_s, (now_s - queue.last_departure_s) / len(queue))
    return queue.ahead(request) * gap_s
