"""Learns how many sequences an engine runs at once, if no profile says it.

An engine that is full keeps further requests in its own queue, where they wait while another
instance may be idle. Two things show that it is full:

- its /metrics report waiting requests: then it runs as many as it can;
- a request's first token comes long after it was sent, and right after another one has finished:
  it waited for a slot. Twice in a row, since one may be chance.

The learnt limit is the most that ran at such moments, and no more are sent. It may be too low (a
cache full of long contexts, an engine restarted with other settings), so more is tried now and
then: one more sequence, then twice as many each time that they begin at once, and less often each
time that they have to wait. The limit is never below what was seen to run at once.

Only for instances without a profile. Nothing here reads a clock.
"""

from __future__ import annotations

from typing import Final

# A first token is late, or follows another's end, by this many times its prefill and three steps,
# and this for the network.
PATIENCE, PATIENCE_S = 3.0, 0.05
_EVIDENCE: Final = 2
# More than there will ever be. Not infinite: columns of figures are subtracted from each other.
NO_LIMIT: Final = 2.0**53
# Time between two tries of more sequences; doubled each time that one fails.
_TRY_EVERY_S, _TRY_SELDOM_S = 4.0, 64.0


class Concurrency:
    """The slots of one engine.

    ``learnt``: sequences that it runs at once; None: not known. ``most``: sequences allowed there.
    """

    __slots__ = ("_every_s", "_evidence", "_more", "_peak", "_try_s", "learnt", "most")

    def __init__(self) -> None:
        self.learnt: int | None = None
        self.most = NO_LIMIT
        self._evidence = 0
        self._peak = 0  # running, at the first tokens that count as evidence
        self._more = 1
        self._every_s = _TRY_EVERY_S
        self._try_s = 0.0

    def __repr__(self) -> str:
        return f"<Concurrency {self.learnt}, {self.most:g} may be there>"

    def began(
        self,
        running: int,
        waited_s: float,
        freed_before_s: float,
        patience_s: float,
        others_s: float,
        now_s: float,
    ) -> None:
        """Note a request's first token.

        Args:
            running: sequences that stream now, this one's included.
            waited_s: since it was sent.
            freed_before_s: since another request ended there.
            patience_s: how long it takes if it begins at once.
            others_s: how long the requests waiting there may take.
        """
        if self.learnt is not None and running > self.learnt:
            self._runs_more(running, now_s)
        if waited_s <= patience_s:
            self._evidence = self._peak = 0
        elif freed_before_s <= patience_s < waited_s - freed_before_s - others_s:
            self._evidence += 1
            self._peak = max(self._peak, running)
            if self._evidence >= _EVIDENCE:
                self._is_full(self._peak, now_s)

    def queues(self, running: int, waiting: int, there: int, now_s: float) -> None:
        """Note what its /metrics report; ``there``: sequences of ours known to be there."""
        if running < 1:
            return
        if waiting > 0:
            self._is_full(running, now_s)
        elif self.learnt is not None:
            if running > self.learnt:
                self._runs_more(running, now_s)
            elif there >= self.learnt:
                self._try_s = min(self._try_s, now_s)  # all that is allowed is running: try more

    def let_pass(self, now_s: float) -> None:
        """Let time pass: more may be due to be tried."""
        if self.learnt is not None and now_s >= self._try_s:
            self.most = float(self.learnt + self._more)
            self._try_s = now_s + self._every_s

    def _is_full(self, running: int, now_s: float) -> None:
        tried = self.learnt is not None and self.most > self.learnt
        if self.learnt is None or (tried and running >= self.learnt) or running < self.learnt:
            self.learnt = running
        self._every_s = min(_TRY_SELDOM_S, 2 * self._every_s) if tried else self._every_s
        self._more, self._evidence, self._peak = 1, 0, 0
        self.most = float(self.learnt)
        self._try_s = now_s + self._every_s

    def _runs_more(self, running: int, now_s: float) -> None:
        assert self.learnt is not None
        if running >= self.most:
            # All that was tried began at once: try more right away.
            self._more *= 2
            self._every_s = _TRY_EVERY_S
            self._try_s = now_s
        self.learnt = running
        self.most = max(self.most, running)
