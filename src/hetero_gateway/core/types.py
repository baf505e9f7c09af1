"""The values that pass between the core and its shells. Immutable, and without behaviour."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, NewType, Protocol

from hetero_gateway.core.costs.profile import Profile

InstanceId = NewType("InstanceId", str)

# Far above what any engine holds, and so low that no product of them overflows a float: beyond
# that, the arithmetic of everyone's placements could break.
MOST_TOKENS: Final = 2**40
MOST_SEQUENCES: Final = 2**31
# The class of a request that was not put into another one.
DEFAULT_CLASS: Final = "interactive"
BATCH_CLASS: Final = "batch"
# The leg of a split request that an instance may serve; it may serve whole requests in any case.
KvRole = Literal["both", "prefill", "decode"]


def roles_pair(prefill: KvRole, decode: KvRole) -> bool:
    """Whether an instance of the one role may compute prompts for one of the other."""
    return prefill != "decode" and decode != "prefill"


class PrefixKeys(NamedTuple):
    """The keys of one text, shortest beginning first.

    Args:
        hashes: 60 bits each.
        ends: bytes of the text that each one stands for; rising.
        text_bytes: length of the whole text; the last piece may end before it.
    """

    hashes: tuple[int, ...]
    ends: tuple[int, ...]
    text_bytes: int


class Draws(Protocol):
    """A source of random numbers: a seeded generator of the standard library, or of numpy."""

    def random(self) -> float:
        """The next one, from 0 to below 1."""
        ...


class Usage(NamedTuple):
    """What the end of an answer reports about its tokens; None: not reported.

    Args:
        prompt_tokens: of all its prompts, cached ones included.
        output_tokens: of all its sequences.
        cached_tokens: prompt tokens found in the engine's prefix cache; 0 is not None. With several
            sequences, engines report one's.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One vLLM instance, as the scheduler sees it.

    Args:
        instance_id: unique in the gateway.
        models: every name it answers to (aliases, LoRA adapters); its load is one for all.
        profile: fitted constants, or None while it is unprofiled.
        max_model_len: longest sequence in tokens, or None while unknown.
        weight: relative capacity for ``weighted-round-robin`` and for unprofiled instances.
        available: False while unhealthy.
        draining: True while it finishes its requests and gets no new ones.
        kv_capacity_tokens: as its engine reports it, for an instance without a profile; None:
            unknown.
        absent_reason: why it is not available, if it is not.
        kv_role: the legs it may serve.
    """

    instance_id: InstanceId
    models: frozenset[str]
    profile: Profile | None = None
    max_model_len: int | None = None
    weight: float = 1.0
    available: bool = True
    draining: bool = False
    kv_capacity_tokens: int | None = None
    absent_reason: str = "unhealthy"
    kv_role: KvRole = "both"


class Outcome(enum.Enum):
    """How a dispatch ended; each of these takes its load off."""

    COMPLETED = "completed"
    UPSTREAM_ERROR = "upstream_error"
    TIMED_OUT = "timed_out"
    CLIENT_DISCONNECTED = "client_disconnected"
    INSTANCE_REMOVED = "instance_removed"


# Used by every request: an enumeration looks a member up at each use, at the price of several
# calls.
COMPLETED, CLIENT_DISCONNECTED = Outcome.COMPLETED, Outcome.CLIENT_DISCONNECTED


class Leg(enum.Enum):
    """The part of a request that an instance does."""

    WHOLE = "whole"
    PREFILL = "prefill"  # its prompt, whose KV stays until another instance has fetched it
    DECODE = "decode"  # its answer, with the KV of its prompt from another instance


# As above.
WHOLE, PREFILL, DECODE = Leg.WHOLE, Leg.PREFILL, Leg.DECODE


class RejectReason(enum.Enum):
    UNKNOWN_MODEL = "unknown_model"
    NO_AVAILABLE_INSTANCE = "no_available_instance"
    FITS_NO_INSTANCE = "fits_no_instance"
    QUEUE_FULL = "queue_full"
    WAIT_TOO_LONG = "wait_too_long"
    CONTINUES_NOTHING = "continues_nothing"


@dataclass(frozen=True, slots=True)
class Reject:
    """Why no instance can take the request. ``detail`` is one line for the client.

    ``wait_s``: the predicted wait, if that is the reason; otherwise 0.
    """

    reason: RejectReason
    detail: str
    wait_s: float = 0.0


class CachedPrefix(NamedTuple):
    """The part of a prompt that an instance should have cached.

    Args:
        match_tokens: of one sequence, how much of the prompt was sent there before.
        trust: the share of such a match that is really found there, 0 to 1.
        cached_tokens: their product.
        prefill_tokens: what is left to compute, of all sequences.
    """

    match_tokens: float
    trust: float
    cached_tokens: float
    prefill_tokens: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One instance's row in the explanation of a decision.

    ``load_s`` is the load before, and ``load_after_s`` the load with the request. ``excluded``: why
    the instance took no part; every figure is then None. ``room``: it may be sent a request now;
    None: the policy does not ask. ``estimates``: the policy's estimates, by name, if it has any.
    ``cached``: the part of the prompt it should have cached; None: no instance is known to have
    any.
    """

    instance_id: InstanceId
    request_time_s: float | None
    kv_usage: float | None
    workload: float | None
    load_s: float | None
    load_after_s: float | None
    in_flight: int | None
    excluded: str | None
    room: bool | None = None
    estimates: Mapping[str, float] = field(default_factory=dict)
    cached: CachedPrefix | None = None
