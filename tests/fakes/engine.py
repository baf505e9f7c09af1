"""An emulated engine with the manners of engines that are not a plain vLLM."""

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.lab.emulator.app import EmulatedVLLM
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from tests.fakes.emulated import serving

# Steps of 3 ms and more: quick, and slow enough that the engine is what takes the time.
QUICK = Constants(p1=2e-5, p2=1e-3, p3=1e-5, p4=1e-2, p5=1e-7, p6=1e-4, p7=1e-6, p8=3e-3)


def quick_profile() -> Profile:
    return Profile("gpu", "m", 1, QUICK, 4096, 4)


@dataclass
class Manners:
    """Stands before an emulated vLLM and changes what a test asks for.

    Args:
        metrics: False: /metrics is 404.
        forced_lengths: False: min_tokens and ignore_eos are ignored.
        refuse: a field and what 400 says to a request that has it.
        vocabulary: token ids from here on are refused.
        die_after: completions after which every connection is reset, and refused from then on.
        stop_after: the completion at which the process stops itself, as by Ctrl-Z; 0: none.
    """

    emulated: EmulatedVLLM
    metrics: bool = True
    forced_lengths: bool = True
    refuse: tuple[str, str] | None = None
    vocabulary: int | None = None
    die_after: int | None = None
    stop_after: int = 0
    completions: int = 0
    keys: set[str] = field(default_factory=set)

    def abort_all(self) -> None:
        """What the server asks at its end."""
        self.emulated.abort_all()

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]):
        if scope["type"] != "http":
            return await self.emulated(scope, receive, send)
        dead = self.die_after is not None and self.completions >= self.die_after
        if dead or (scope["path"] == "/metrics" and not self.metrics):
            return await _answer(send, 503 if dead else 404, b"gone")
        if scope["method"] != "POST":
            return await self.emulated(scope, receive, send)
        self.completions += 1
        if self.completions == self.stop_after:
            os.kill(os.getpid(), signal.SIGSTOP)
        body = json.loads(await _read(receive))
        self.keys |= set(body)
        if (text := self._refusal(body)) is not None:
            error = {"message": text, "type": "BadRequestError", "param": None, "code": 400}
            return await _answer(send, 400, json.dumps({"error": error}).encode())
        if not self.forced_lengths:
            body.pop("min_tokens", None)
            body.pop("ignore_eos", None)
        raw = json.dumps(body).encode()
        sent = False

        async def replay() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": raw, "more_body": False}

        return await self.emulated(scope, replay, send)

    def _refusal(self, body: dict[str, Any]) -> str | None:
        if self.refuse is not None:
            name, text = self.refuse
            if name in body or name in (body.get("stream_options") or {}):
                return text
        if self.vocabulary is not None and max(body["prompt"]) >= self.vocabulary:
            return f"Token id {max(body['prompt'])} is out of vocabulary"
        return None


async def _read(receive: Callable[[], Awaitable[Any]]) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Callable[[Any], Awaitable[None]], status: int, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def engine(
    settings: EmulatorSettings | None = None, **manners: Any
) -> AsyncIterator[tuple[str, Manners]]:
    """(its URL, its manners), in the test's event loop; ``settings`` default to quick ones."""
    app = Manners(
        EmulatedVLLM(settings or EmulatorSettings(quick_profile(), max_model_len=512)), **manners
    )
    async with serving(app) as url:
        yield url, app
