"""How many sequences an engine runs at once, where nobody says: learnt from what is seen of it.

An engine that is full keeps what comes next in its own queue, where it waits while another instance
may be idle. Two things show that it is full:

- its /metrics have requests waiting: then it runs as many as it can;
- a request's first token comes long after it was sent, and at once when another one has ended:
  a slot is what it waited for. Twice in a row, since one may be chance.

What is learnt is the most that ran at such moments, and no more is sent. It may be too low (a cache
that was full of long contexts, an engine that was restarted with other settings), so once in a
while more is tried: one sequence, then twice as many each time that they begin at once, and more
seldom each time that they have to wait. Whatever is seen to run at once is the least it can be.

Only for instances without a profile: a profile says it. Nothing here reads a clock.
"""

from __future__ import annotations

from typing import Final

# A first token is late, or follows on another's end, by what its prefill and three steps take, so
# many times, and this for the network.
PATIENCE, PATIENCE_S = 3.0, 0.05
_EVIDENCE: Final = 2
# More than will ever be there. Not infinite: columns of figures are subtracted from each other.
NO_LIMIT: Final = 2.0**53
# Between two tries to run more; doubled each time that it fails.
_TRY_EVERY_S, _TRY_SELDOM_S = 4.0, 64.0


class Concurrency:
    """The slots of one engine.

    ``learnt``: sequences that it runs at once; None: not known. ``most``: that may be there.
    """

    __slots__ = ("_every_s", "_evidence", "_more", "_peak", "_try_s", "learnt", "most")

    def __init__(self) -> None:
        self.learnt: int | None = None
        self.most = NO_LIMIT
        self._evidence = 0
        self._peak = 0  # running, over the first tokens that are evidence
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
        """A request's first token was seen.

        Args:
            running: sequences that stream now, this one's included.
            waited_s: since it was sent.
            freed_before_s: since another one ended there.
            patience_s: how long it takes if it begins at once.
            others_s: and how long those that wait there may take.
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
        """What its /metrics say; ``there``: sequences that we know to be there."""
        if running < 1:
            return
        if waiting > 0:
            self._is_full(running, now_s)
        elif self.learnt is not None:
            if running > self.learnt:
                self._runs_more(running, now_s)
            elif there >= self.learnt:
                self._try_s = min(self._try_s, now_s)  # all that is allowed runs: is there more?

    def let_pass(self, now_s: float) -> None:
        """Time goes by: perhaps more is to be tried."""
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
            # All that was tried began at once: try more of it, now.
            self._more *= 2
            self._every_s = _TRY_EVERY_S
            self._try_s = now_s
        self.learnt = running
        self.most = max(self.most, running)
