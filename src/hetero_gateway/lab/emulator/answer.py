"""What one sequence will say, decided before it runs: its length, its words, why it ends.

Only forced lengths are real properties of a request; the rest stands in for a model:

- ``ignore_eos`` runs to max_tokens, and without one to the end of the context window;
- otherwise the length is drawn, at least min_tokens, and cut to max_tokens ("length");
- a ``stop`` string ends it where it appears after min_tokens, ignore_eos or not, and is cut off;
- a forced text (JSON) comes in tokens of 4 characters, whatever length was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hetero_gateway.lab.emulator.bodies import Ask
from hetero_gateway.lab.emulator.settings import OutputLengths
from hetero_gateway.lab.emulator.text import BYTES_PER_TOKEN, escape, words


@dataclass(frozen=True, slots=True)
class Script:
    """``pieces`` has one entry per token: text as it stands within a JSON string."""

    pieces: list[bytes]
    finish_reason: str
    stop_reason: str | None = None


def make_answer(ask: Ask, limit_tokens: int, lengths: OutputLengths, rng: Random) -> Script:
    """The answer of one sequence that may have at most ``limit_tokens`` tokens."""
    if ask.forced_text is not None:
        text = ask.forced_text
        pieces = [
            escape(text[i : i + BYTES_PER_TOKEN]) for i in range(0, len(text), BYTES_PER_TOKEN)
        ]
        whole = len(pieces) <= limit_tokens
        finish = ask.tool_finish if ask.tool else "stop"
        return Script(pieces[:limit_tokens], finish if whole else "length")
    # Drawn in any case, so that ignore_eos changes the length and not the words.
    drawn = max(lengths.draw(max(rng.random(), 1e-12)), ask.min_tokens)
    ends_itself = not ask.ignore_eos and drawn <= limit_tokens
    pieces = words(rng.getrandbits(32), drawn if ends_itself else limit_tokens)
    if ask.stop and (stopped := _stopped(ask, pieces)):
        return stopped
    return Script(pieces, "stop" if ends_itself else "length")


def _stopped(ask: Ask, pieces: list[bytes]) -> Script | None:
    """The answer cut where a stop string first appears; None when none does.

    Like vLLM, text that came before min_tokens is not searched.
    """
    text = b"".join(pieces).decode()
    start = sum(map(len, pieces[: ask.min_tokens]))
    found = [(text.find(stop, start), stop) for stop in ask.stop]
    found = [(at, stop) for at, stop in found if at >= 0]
    if not found:
        return None
    at, stop = min(found, key=lambda hit: hit[0] + len(hit[1]))
    kept: list[bytes] = []
    position = 0
    for piece in pieces:
        kept.append(piece[: max(0, at - position)])
        position += len(piece)
        if position >= at + len(stop):
            break
    return Script(kept, "stop", stop)
