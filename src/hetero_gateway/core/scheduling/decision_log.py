"""The last decisions, for later questions.

Each is packed into one row of numbers beside the data it shares with others. A few hundred
decisions as objects would be some thousand objects that every request has to touch when the oldest
goes: they took a tenth of a request's CPU in a real server, whose caches are cold (nothing in a
loop of one process). A decision is unpacked when someone asks for its explanation.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from hetero_gateway.core.policies.base import Choice, Decision, View
from hetero_gateway.core.prefixes.caches import Prefix
from hetero_gateway.core.request import Request

_PACKERS: dict[int, Any] = {}  # by how many numbers there are; decisions have a few lengths


class LoggedDecision(NamedTuple):
    """A decision and its request.

    Args:
        placed_s: when, on the scheduler's clock; with the id it finds the request's outcome.
        request_id: of the request.
        decision: with the model and lengths of its request only.
        waited_s: in the gateway's queue.
    """

    placed_s: float
    request_id: str
    decision: Decision
    waited_s: float


class DecisionLog:
    """Keeps the last ``size`` decisions.

    ``noted``: decisions kept by the next ``keep_noted``, as arguments of ``append``; several at a
    time, since a single decision would find none of this in the processor's caches.
    """

    def __init__(self, size: int) -> None:
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=size)
        self.noted: list[tuple[float, bytes, Decision, float]] = []

    def __len__(self) -> int:
        self.keep_noted()
        return len(self._rows)

    def append(
        self, placed_s: float, request_id: bytes, decision: Decision, waited_s: float
    ) -> None:
        """Keep one. ``placed_s``, ``waited_s``: as of a ``LoggedDecision``."""
        self.noted.append((placed_s, request_id, decision, waited_s))
        self.keep_noted()

    def keep_noted(self) -> None:
        """Keep the decisions that were noted."""
        noted, self.noted = self.noted, []
        for placed_s, request_id, decision, waited_s in noted:
            request, choice = decision.request, decision.choice
            numbers = [
                placed_s,
                waited_s,
                choice.position,
                choice.charge,
                request.prompt_tokens,
                request.predicted_output_tokens,
                request.sequences,
                request.streams,
                decision.prefill_tokens,
                decision.kv_tokens,
            ]
            prefix = decision.prefix
            if prefix is not None:
                numbers += prefix.match_tokens
                numbers += prefix.trust
                numbers += prefix.cached_tokens
            numbers += choice.data
            pack = _PACKERS.get(len(numbers))
            if pack is None:
                pack = _PACKERS[len(numbers)] = struct.Struct(f"{len(numbers)}d").pack
            leg = None
            if choice.prefill_position >= 0:
                leg = choice.prefill_position, choice.prefill_s, choice.transfer_s
            self._rows.append(
                (
                    pack(*numbers),  # without an object for each number
                    choice.names,
                    choice.by_speed,
                    request_id,
                    request.model,
                    decision.ids,
                    decision.theta,
                    decision.policy,
                    decision.excluded,
                    leg,
                )
            )

    def newest_first(self, request_id: bytes | None = None) -> Iterator[LoggedDecision]:
        """All of them, or those of one request, newest first."""
        self.keep_noted()
        for row in reversed(self._rows):
            if request_id is None or row[3] == request_id:
                yield _unpacked(*row)


def _unpacked(
    numbers: bytes,
    names: tuple[str, ...],
    by_speed: bool,
    request_id: bytes,
    model: str,
    ids: Any,
    theta: float,
    policy: Any,
    excluded: Any,
    leg: tuple[int, float, float] | None,
) -> LoggedDecision:
    row, count = array("d", numbers).tolist(), len(ids)
    placed_s, waited_s, position, charge, prompt, output, sequences, streams, prefill, kv = row[:10]
    cached, data = row[10 : -count * len(names)], row[-count * len(names) :]
    prefix = None
    if cached:
        prefix = Prefix(cached[:count], cached[count : 2 * count], cached[2 * count :])
    choice = Choice(int(position), charge, names, data, by_speed=by_speed)
    if leg is not None:
        choice.prefill_position, choice.prefill_s, choice.transfer_s = leg
    if "latency_s" in names:
        choice.latency_s = choice.figures.at("latency_s", choice.position)
    request = Request(model, int(prompt), output, int(sequences), bool(streams))
    # What another candidate would have had to compute is not needed.
    view = View(request, ids, (), (), [prefill] * count, int(kv), prefix, theta, placed_s, None)
    decision = Decision(view, choice, policy, excluded)
    return LoggedDecision(placed_s, request_id.decode(), decision, waited_s)
