"""Refuses requests that would wait too long, rather than let them wait in vain. Pure.

A wait is predicted from how fast requests leave a queue that is never empty meanwhile, and from how
many are ahead by the discipline: all waiting requests if it has one row; with several rows, those
of the same row, as often as the row's turn comes, and what the row was given in advance. Before
anything has left, the cost model gives the rate.

If the queue sets no limit, the goal for the first token is one, less the time between a wait's end
and that token: as predicted for those placed recently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from hetero_gateway.core.policies.slo import Slos
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.queue import ModelQueue
from hetero_gateway.core.types import BATCH_CLASS

# Seats become free by chance, and predictions with them: admitted requests are to meet the limit.
MARGIN: Final = 0.75
# What fewer departures show is chance.
_LEAST_DEPARTURES: Final = 4


class WaitLimits(NamedTuple):
    """The longest wait of admitted requests, s; inf: any.

    A request is refused if its predicted wait exceeds ``MARGIN`` of it. Batches are refused first:
    where nothing is set for them, they get half.

    Args:
        most_s: of classes that are not among ``classes``.
        classes: by name.
        slos: if neither sets a limit, the limits of the requests' first tokens; None: none.
    """

    most_s: float = math.inf
    classes: Mapping[str, float] = {}
    slos: Slos | None = None

    def of(self, request: Request, first_token_s: float) -> float:
        """The longest wait of a request whose first token follows its wait after this long, s."""
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
        queue: of its model; something waits there.
        drain_s: how long all of it takes by the cost model.
    """
    gap_s = drain_s / len(queue)
    if queue.departures >= _LEAST_DEPARTURES:
        # Longer than the mean if nothing has left for longer.
        gap_s = max(queue.mean_departure_gap_s, (now_s - queue.last_departure_s) / len(queue))
    return queue.ahead(request) * gap_s
