"""Free TCP ports, for what cannot take port 0 and say which one it got.

What can, should: a port that was free a moment ago may be taken. These are below Linux's ephemeral
ports (32768 and up), so that no outgoing connection takes one in between, and drawn by chance, so
that two searches at the same time seldom meet.
"""

from __future__ import annotations

import contextlib
import random
import socket

_FIRST, _END = 20_000, 32_000
_ATTEMPTS = 1000


def free_port(in_a_row: int = 1) -> int:
    """A port that nobody has bound now: the first of so many in a row."""
    chance = random.SystemRandom()  # tests seed the common generator
    for _ in range(_ATTEMPTS):
        first = chance.randrange(_FIRST, _END - in_a_row + 1)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + in_a_row):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError(f"no {in_a_row} free ports in a row")
