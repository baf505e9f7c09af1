"""Recorded runs: written by ``serve --record``, and read by ``simulate --against``. JSON lines.

Line 1 is a header. Each instance is described in a line of its own before its first request; each
request is a line when it has ended. A process that continued after another has its own header. The
file contains nothing of a prompt, an answer, a client or a request's id.

    {"record": 1, "policy": "finish-time", "started_s": 8123.5, "unix_s": 1790000000.0}
    {"instance": "a100", "profile": {...}, "weight": 1.0}
    {"at": 8124.1, "in": 412, "out": 59, ...}

Times are of the monotonic clock of the machine, s.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.errors import ConfigError, ProfileError

VERSION = 1
# Far more than a tokenizer makes of any body, or an engine of an answer.
_MOST_TOKENS = 2**31
_MOST_SEQUENCES = 2**16


class Header(msgspec.Struct, omit_defaults=True):
    """Of a recording process. ``started_s``: monotonic; ``unix_s``: the same moment."""

    record: int
    policy: str
    started_s: float
    unix_s: float


class InstanceLine(msgspec.Struct, omit_defaults=True):
    """An instance in the scheduler's view. ``profile`` None: it has no constants for it."""

    instance: str
    weight: float
    profile: dict[str, Any] | None = None


class RequestLine(msgspec.Struct, omit_defaults=True, rename={"prompt": "in"}):
    """A request that has ended.

    Args:
        at: its arrival; ``placed``, ``first``, ``end``: when it was sent to its instance, when
            its first byte came, and when it ended. None: it did not.
        model: the requested name.
        prompt, out: tokens of the prompt of one sequence, and of the whole answer, as the
            engine reported them, or else as estimated and counted.
        predicted: output tokens of one sequence, as placed.
        n: sequences.
        limit: the client's limit of output tokens.
        instance: its last instance; "": none.
        outcome: as in the metrics.
        stream: whether its tokens came one by one.
        cached: tokens of its prompts that the engine found in its prefix cache.
    """

    at: float
    model: str
    prompt: int
    out: int
    predicted: float
    outcome: str
    instance: str = ""
    placed: float | None = None
    first: float | None = None
    end: float | None = None
    n: int = 1
    limit: int | None = None
    stream: bool = False
    cached: int = 0


class LeftOut(msgspec.Struct):
    """The last line: requests missing above it, and why."""

    left_out: int
    why: str


Line = Header | InstanceLine | RequestLine | LeftOut


def profile_as_dict(profile: Profile) -> dict[str, Any]:
    """A profile as stored in a line."""
    kept = dataclasses.asdict(profile) | {"constants": dataclasses.astuple(profile.constants)}
    del kept["source"]
    return kept


@dataclass(frozen=True, slots=True)
class RecordedInstance:
    """In the scheduler's view; ``profile`` None: it had no constants for it."""

    instance_id: str
    profile: Profile | None
    weight: float


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A gateway's record.

    ``instances``: by id, in the order of their first requests, as last described. ``requests``:
    in the order of their arrival; times count from the first one's. ``left_out``: those that the
    gateway could not keep.
    """

    policy: str
    instances: dict[str, RecordedInstance]
    requests: tuple[RequestLine, ...]
    left_out: int


def read_recorded_run(path: Path) -> RecordedRun:
    """Read a file that ``serve --record`` wrote.

    Raises:
        ConfigError: one line with the file, the line and what is wrong with it.
    """
    policy, instances, requests, left_out = "", {}, [], 0
    for number, line in _lines(path):
        where = f"{path}: line {number}"
        if isinstance(line, Header):
            if line.record != VERSION:
                raise ConfigError(f"{where}: this version reads records of version {VERSION} only")
            if policy and policy != line.policy:
                raise ConfigError(f"{where}: the policy changes, from {policy} to {line.policy}")
            policy = line.policy
        elif not policy:
            raise ConfigError(f"{where}: it does not begin with a header; is it a record?")
        elif isinstance(line, InstanceLine):
            instances[line.instance] = _instance(line, where)
        elif isinstance(line, LeftOut):
            left_out += line.left_out
        else:
            _check(line, where)
            if line.instance and line.instance not in instances:
                raise ConfigError(f"{where}: instance {line.instance!r} is not described above it")
            requests.append(line)
    if not requests:
        raise ConfigError(f"{path}: no request is in it")
    requests.sort(key=lambda request: request.at)
    start_s = requests[0].at
    for request in requests:
        request.at -= start_s
        for name in ("placed", "first", "end"):
            if (time_s := getattr(request, name)) is not None:
                setattr(request, name, time_s - start_s)
    return RecordedRun(policy, instances, tuple(requests), left_out)


def _lines(path: Path) -> Iterator[tuple[int, Line]]:
    kinds: tuple[tuple[bytes, Any], ...] = (
        (b'{"record":', msgspec.json.Decoder(Header)),
        (b'{"instance":', msgspec.json.Decoder(InstanceLine)),
        (b'{"left_out":', msgspec.json.Decoder(LeftOut)),
        (b'{"at":', msgspec.json.Decoder(RequestLine)),
    )
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return  # the process was killed while writing
                decoder = next((d for begin, d in kinds if text.startswith(begin)), None)
                if decoder is None:
                    raise ConfigError(f"{path}: line {number}: it is no line of a record")
                try:
                    yield number, decoder.decode(text)
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{path}: line {number}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _instance(line: InstanceLine, where: str) -> RecordedInstance:
    profile, known = None, line.profile
    if known is not None:
        try:
            profile = Profile(
                str(known["gpu"]),
                str(known["model"]),
                int(known["tensor_parallel"]),
                Constants(*map(float, known["constants"])),
                int(known["kv_capacity_tokens"]),
                int(known["max_num_seqs"]),
                # Not in the records of earlier versions.
                first_token_s=float(known.get("first_token_s", 0.0)),
                plans_ahead=bool(known.get("plans_ahead", False)),
                experts_awake_at=float(known.get("experts_awake_at", 0.0)),
                idle_expert_s=float(known.get("idle_expert_s", 0.0)),
            )
        except (KeyError, TypeError, ValueError, OverflowError, ProfileError) as error:
            raise ConfigError(f"{where}: its profile cannot be read: {error!r}") from None
    if not 0 < line.weight < math.inf:
        raise ConfigError(f"{where}: weight is {line.weight}: it must be above 0")
    return RecordedInstance(line.instance, profile, line.weight)


def _check(line: RequestLine, where: str) -> None:
    times = (line.at, line.placed, line.first, line.end)
    if not all(time_s is None or math.isfinite(time_s) for time_s in times):
        raise ConfigError(f"{where}: a time is not finite")
    for name, low, high, value in (
        ("in", 0, _MOST_TOKENS, line.prompt),
        ("out", 0, _MOST_TOKENS, line.out),
        ("predicted", 0, _MOST_TOKENS, line.predicted),
        ("n", 1, _MOST_SEQUENCES, line.n),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{where}: {name} is {value}: it must be from {low} to {high}")
