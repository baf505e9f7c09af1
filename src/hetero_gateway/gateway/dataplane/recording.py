"""``serve --record FILE``: a line for each ended request, written by a thread.

The event loop makes a small record of each request's numbers and puts it in a bounded list; the
thread turns them into lines and writes them. Records that do not fit, because the disk is too slow
or the file is full, are counted and left out. A failing disk ends the recording, with a line in the
log, and nothing else. Without ``--record`` none of this runs: ``RecordingRecorder`` and
``RecordingDispatcher`` replace their bases.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.recorded_run import (
    VERSION,
    Header,
    InstanceLine,
    LeftOut,
    Line,
    RequestLine,
    profile_as_dict,
)
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.gateway.dataplane.placement import LocalDispatcher
from hetero_gateway.gateway.dataplane.records import (
    AnswerTokens,
    Recorder,
    SettledAttempt,
    label_of,
)
from hetero_gateway.gateway.fleet.instances import Instance

_log = logging.getLogger(__name__)

# About 200 bytes each: 400 MB at most.
MOST_REQUESTS = 2_000_000
# Waiting for the thread: ten seconds of a very busy gateway.
_MOST_WAITING = 50_000
_WRITE_EVERY_S = 0.5


class RunFile:
    """The file, and the thread that writes it.

    Args:
        path: of the file; existing content stays.
        policy: by its name.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path, policy: str) -> None:
        self._path = path
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._file = os.fdopen(descriptor, "ab")
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror or error}") from None
        self._waiting: deque[Line] = deque()
        self._lines = 0
        self._left_out = 0
        self._why = ""
        self._ends = threading.Event()
        self._waiting.append(Header(VERSION, policy, time.monotonic(), time.time()))
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def add(self, line: Line) -> None:
        """Keep a line, if there is room for it."""
        if len(self._waiting) >= _MOST_WAITING:
            self._leave_out("the disk is too slow")
        elif self._lines >= MOST_REQUESTS:
            self._leave_out(f"there are {MOST_REQUESTS} lines already")
        else:
            self._lines += 1
            self._waiting.append(line)

    def _leave_out(self, why: str) -> None:
        self._left_out += 1
        if why != self._why:
            self._why = why
            _log.warning("%s: requests are left out: %s", self._path, why)

    def close(self) -> None:
        """Write what is left; waits up to a second for the disk."""
        if self._ends.is_set():
            return
        if self._left_out:
            self._waiting.append(LeftOut(self._left_out, self._why))
        self._ends.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        encode = msgspec.json.Encoder().encode
        try:
            with self._file as file:
                ends = False
                while not ends:
                    ends = self._ends.wait(_WRITE_EVERY_S)
                    for _ in range(len(self._waiting)):
                        file.write(encode(self._waiting.popleft()) + b"\n")
                    file.flush()
        except OSError as error:
            _log.error("%s: %s; recording has stopped", self._path, error.strerror or error)
            self._lines = MOST_REQUESTS
            self._waiting.clear()


class RecordingRecorder(Recorder):
    """A recorder that also keeps a line for each request. Its other arguments are its base's."""

    def __init__(self, run: RunFile, *parts: Any) -> None:
        super().__init__(*parts)
        self._run = run
        self._described: dict[str, tuple[Profile | None, float]] = {}

    def learn_from(self, attempt: SettledAttempt, told: AnswerTokens | None) -> None:
        super().learn_from(attempt, told)
        job, placed, exchange = attempt.job, attempt.placed, attempt.seen
        outcome, now_s = attempt.outcome, attempt.ended_s
        instance = placed.instance
        if self._fleet.instances.get(instance.id) is not instance:
            return  # removed meanwhile: its description is gone
        self._describe(instance)
        request, parsed = placed.decision.request, job.parsed
        told_prompt, out = (None, 0) if told is None else (told.prompt, told.output)
        cached = None if told is None else exchange.usage().cached_tokens
        prompt = request.prompt_tokens
        if told_prompt:
            prompt = max(1, round(told_prompt / max(1, parsed.prompt_count)))
        self._run.add(
            RequestLine(
                job.inbound.received_s,
                request.model,
                prompt,
                out,
                request.predicted_output_tokens,
                label_of(outcome, exchange),
                instance.id,
                placed.placed_s,
                exchange.first_body_at_s,
                now_s,
                request.sequences,
                parsed.max_output_tokens,
                parsed.stream,
                cached or 0,
            )
        )

    def _describe(self, instance: Instance) -> None:
        """Describe an instance if it is new or what is known of it has changed."""
        known = self._fleet.scheduler.members.specs[instance.id].profile, instance.weight
        if self._described.get(instance.id) != known:
            self._described[instance.id] = known
            profile = None if known[0] is None else profile_as_dict(known[0])
            self._run.add(InstanceLine(instance.id, instance.weight, profile))


class RecordingDispatcher(LocalDispatcher):
    """A dispatcher that also keeps a line for each request that reached no instance."""

    def __init__(self, run: RunFile, *parts: Any) -> None:
        super().__init__(*parts)
        self._run = run

    def note(self, job: Job | None, outcome: str) -> None:
        super().note(job, outcome)
        if job is None:
            return  # it was not even understood
        request, parsed = job.request, job.parsed
        self._run.add(
            RequestLine(
                job.inbound.received_s,
                request.model,
                request.prompt_tokens,
                0,
                request.predicted_output_tokens,
                outcome,
                end=time.monotonic(),
                n=request.sequences,
                limit=parsed.max_output_tokens,
                stream=parsed.stream,
            )
        )
