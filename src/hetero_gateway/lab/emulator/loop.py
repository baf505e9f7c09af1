"""The engine against the wall clock: one loop that sleeps until each step's end and delivers it.

A step's end is planned from the last step's planned end, so that late wake-ups (timers have a
resolution of about 1 ms) do not add up. When the process falls behind by more than ``MAX_LAG_S``
the schedule is moved to now, and the lost time is counted, so that a measurement on an overloaded
machine can be recognised.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from hetero_gateway.errors import ConfigError
from hetero_gateway.lab.emulator.metrics import EmulatedMetrics
from hetero_gateway.lab.emulator.reply import EmulatedReply, ReplyChoice
from hetero_gateway.lab.emulator.settings import BLOCK_TOKENS, EmulatorSettings
from hetero_gateway.sim.engine import DEFAULT_MAX_BATCHED_TOKENS, Engine, Step

MAX_LAG_S = 0.25
# libuv's timers are in whole milliseconds: a step may end this much early, never earlier.
TIMER_RESOLUTION_S = 0.0005


def make_engine(settings: EmulatorSettings) -> Engine[ReplyChoice]:
    """The engine that the settings describe.

    Raises ConfigError: sizes that contradict each other.
    """
    profile = replace(settings.profile, kv_capacity_tokens=settings.capacity_tokens)
    max_num_seqs = settings.max_num_seqs or profile.max_num_seqs
    budget = settings.max_num_batched_tokens or max(DEFAULT_MAX_BATCHED_TOKENS, max_num_seqs)
    try:
        return Engine(
            profile,
            scheduling=settings.scheduling,
            max_num_seqs=max_num_seqs,
            block_tokens=BLOCK_TOKENS,
            max_batched_tokens=budget,
            slowdown=settings.slowdown,
            prefix_caching=settings.prefix_caching,
        )
    except ValueError as error:
        raise ConfigError(f"--max-num-batched-tokens: {error}") from error


class EngineLoop:
    """Drives one engine; ``run`` is the only task, whatever the number of streams."""

    def __init__(self, settings: EmulatorSettings) -> None:
        self.engine = make_engine(settings)
        self.metrics = EmulatedMetrics(settings, self.engine)
        self._time_scale = settings.time_scale
        self._first_token_s = settings.profile.first_token_s / settings.time_scale
        self._work = asyncio.Event()
        self._submitted_s = 0.0
        self._open: set[EmulatedReply] = set()
        self.on_steps: list[Callable[[], None]] = []  # called after each step

    def submit(self, reply: EmulatedReply) -> None:
        """Queue every sequence of a reply whose response is open.

        First comes the server's time before a first token, which occupies nothing.
        """
        self.open(reply)
        if self._first_token_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self._first_token_s, self._enqueue_open, reply)
        else:
            self.enqueue(reply)

    def _enqueue_open(self, reply: EmulatedReply) -> None:
        if reply in self._open:  # its client may have gone
            self.enqueue(reply)

    def open(self, reply: EmulatedReply) -> None:
        """A reply is in progress, whether its sequences are queued yet or not."""
        self._open.add(reply)

    def enqueue(self, reply: EmulatedReply) -> None:
        """Queue every sequence of an open reply."""
        for choice in reply.choices:
            self.engine.submit(choice)
        self.wake()

    def wake(self) -> None:
        """There may be something to do."""
        if not self._work.is_set():
            self._submitted_s = time.perf_counter()
            self._work.set()

    def cancel(self, reply: EmulatedReply) -> None:
        """Drop the rest of a reply: its client has left. Frees its KV at once."""
        self._open.discard(reply)
        for choice in reply.choices:
            self.engine.abort(choice)
        reply.left()

    def fail(self, reply: EmulatedReply) -> None:
        """End a reply like an engine that cannot continue it."""
        self._open.discard(reply)
        for choice in reply.choices:
            self.engine.abort(choice)
        self.metrics.failed(reply)
        reply.fail()

    def fail_all(self) -> None:
        """The engine has died, with everything in progress."""
        for reply in list(self._open):
            if reply.unfinished:
                self.fail(reply)

    def abort_all(self) -> None:
        """End every open response now."""
        for reply in list(self._open):
            if reply.unfinished:
                self.cancel(reply)
                reply.abort()

    async def run(self) -> None:
        """Step for ever; ends by cancellation."""
        planned_s = 0.0
        while True:
            step = self.engine.begin_step()
            if step is None:
                self._work.clear()
                await self._work.wait()
                planned_s = self._submitted_s
                continue
            planned_s += step.duration_s / self._time_scale
            lag_s = time.perf_counter() - planned_s
            if lag_s > MAX_LAG_S:
                self.metrics.lost_s += lag_s
                planned_s += lag_s
            await _sleep_until(planned_s)
            self._deliver(step)

    def _deliver(self, step: Step[ReplyChoice]) -> None:
        result = self.engine.end_step()
        now_s = time.perf_counter()
        metrics = self.metrics
        if step.decode_sequences:
            metrics.inter_token_s.observe(step.duration_s / self._time_scale, step.decode_sequences)
        for choice in result.emitted:
            choice.emitted += 1
            reply = choice.reply
            if choice.emitted == 1:
                choice.first_token_s = now_s
                metrics.first_token_s.observe(now_s - reply.arrived_s)
            if reply.streamed:
                reply.on_token(choice)
        for choice in result.finished:
            metrics.finished(choice, now_s)
            if choice.reply.on_end is not None:
                choice.reply.on_end(choice)
            if not choice.reply.streamed:
                choice.reply.on_finished()
        for call in self.on_steps:
            call()


async def _sleep_until(when_s: float) -> None:
    """Return at ``when_s``, after other tasks ran at least once."""
    while True:
        delay_s = when_s - time.perf_counter()
        await asyncio.sleep(max(0.0, delay_s))
        if when_s - time.perf_counter() < TIMER_RESOLUTION_S:
            return
