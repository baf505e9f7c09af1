"""Records of the load on an instance: one request of ours, and another gateway's sums.

Plain records: ``state.py`` creates and changes them, and lists the possible changes.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from hetero_gateway.core.instances.observation import FirstTokenRow
from hetero_gateway.core.instances.prefix_hits import Interval, PrefixHits
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import WHOLE, InstanceId, Leg, Outcome, Usage

# Loads are whole numbers of 2^-40 s: 0.9 ps, far below any workload that matters, and a power of
# two keeps floats exact.
UNITS_PER_S: Final = 2.0**40
# T of the longest possible request, times e^50, is far below this, and so are its tokens; sums of
# this size stay finite.
_MOST_WORKLOAD_S: Final = 1e100
_MOST_TOKENS: Final = 2.0**80


class Holder:
    """The instance of a dispatch: the part of ``InstanceState`` that its holder may call."""

    __slots__ = ("in_flight", "instance_id", "prefix", "shared_tokens")

    instance_id: InstanceId
    in_flight: int
    shared_tokens: float
    prefix: PrefixHits

    def first_token(self, entry: Dispatch, now_s: float, *, seen: bool = True) -> bool:
        """Note its first token."""
        raise NotImplementedError

    def made_tokens(self, entry: Dispatch, now_s: float) -> float:
        """Tokens that an outstanding request has made by now."""
        raise NotImplementedError

    def observe_answer(
        self, entry: Dispatch, output_tokens: float, now_s: float, usage: Usage | None = None
    ) -> None:
        """Learn from a complete request whose tokens were not seen."""
        raise NotImplementedError

    def prefilled(self, entry: Dispatch, now_s: float) -> bool:
        """Note that its prompt is computed and waits to be fetched."""
        raise NotImplementedError

    def settle(
        self, entry: Dispatch, outcome: Outcome, now_s: float, usage: Usage | None = None
    ) -> bool:
        """Settle it."""
        raise NotImplementedError


class Dispatch:
    """One request on one instance, with what it was charged. Only its instance's state changes it.

    Construction raises ValueError for a charge that is negative, not finite or absurd.

    Attributes:
        workload: what it added to the load, s.
        kv_tokens: tokens it will hold in the KV cache at its end.
        prompt_tokens, prefill_tokens, output_tokens: of all its sequences: the prompts, the part
            of them that the engine has to compute, and the predicted output.
        units: the workload in units of 1 / ``UNITS_PER_S``, whole.
        outcome: how it ended; None while it is outstanding.
        streaming: past its first token.
        tracked: its progress is followed; otherwise only its load counts.
        stage: index in ``STAGE_TOKENS`` of its progress; -1: it does not stream.
        joined: the instance's step clock at its first token, steps.
        prefilled_s: modelled time that the instance had spent on prompts by then, s.
        predicted_s: when it was sent, s, and its predicted time to the first token, s, if that will
            not be seen.
        sent_s: when it was sent, if its progress is followed; infinite: it has yet to be, once
            another instance has computed its prompt.
        expected_s: when its first token was due after that, s; infinite: unknown.
        match_tokens: prompt tokens of one sequence that its instance should have cached.
        known_keys: keys of its prompt that its instance had before; None: not known.
        before: when it was sent, s, and what was there: sequences waiting, their prompt tokens to
            compute, sequences streaming, tokens cached; None: nothing is to be learnt from it.
        hit_tokens: prompt tokens found in the prefix cache, as its answer reported at the end;
            None: not reported (yet).
        interval: where its prefill is counted, until it is settled.
        first_token: its row of first tokens, while the number of prefilled tokens is unknown.
        leg: which part of the request it is.
        pinned: a prefill leg whose prompt is computed: its KV waits to be fetched.
        turn: how a discipline with shares for clients counted it; None: it was not counted.
    """

    __slots__ = (
        "before",
        "expected_s",
        "first_token",
        "hit_tokens",
        "interval",
        "joined",
        "known_keys",
        "kv_tokens",
        "leg",
        "match_tokens",
        "outcome",
        "output_tokens",
        "pinned",
        "predicted_s",
        "prefill_tokens",
        "prefilled_s",
        "prompt_tokens",
        "request",
        "sent_s",
        "stage",
        "state",
        "streaming",
        "tracked",
        "turn",
        "units",
        "workload",
    )

    def __init__(
        self,
        state: Holder,
        request: Request,
        workload: float,
        kv_tokens: int,
        prefill_tokens: float,
        *,
        tracked: bool,
    ) -> None:
        n = request.sequences
        self.state = state
        self.request = request
        self.workload = workload
        self.kv_tokens = kv_tokens
        self.prompt_tokens = n * request.prompt_tokens
        self.prefill_tokens = prefill_tokens
        self.output_tokens = n * request.predicted_output_tokens
        # A charge must come off again exactly: only numbers that allow it may enter the sums.
        if not (
            0 <= workload <= _MOST_WORKLOAD_S
            and 0 <= kv_tokens <= _MOST_TOKENS
            and 0 <= prefill_tokens <= _MOST_TOKENS
            and 0 <= self.prompt_tokens <= _MOST_TOKENS
            and 0 <= self.output_tokens <= _MOST_TOKENS
        ):
            raise ValueError("what a request is charged must be finite, bounded and not negative")
        self.outcome: Outcome | None = None
        self.streaming = False
        self.tracked = tracked
        self.units = round(workload * UNITS_PER_S)
        self.stage = -1
        self.joined = 0.0
        self.prefilled_s = 0.0
        self.sent_s = 0.0
        self.expected_s = math.inf
        self.predicted_s: tuple[float, float] | None = None
        self.before: tuple[float, float, float, float, float] | None = None
        self.match_tokens = 0.0
        self.known_keys: int | None = None
        self.hit_tokens: float | None = None
        self.interval: Interval | None = None
        self.first_token: FirstTokenRow | None = None
        self.turn: object = None
        self.leg: Leg = WHOLE
        self.pinned = False

    @property
    def instance_id(self) -> InstanceId:
        return self.state.instance_id

    def __repr__(self) -> str:
        phase = "streaming" if self.streaming else "pinned" if self.pinned else "waiting"
        where = phase if self.outcome is None else self.outcome.value
        return f"<Dispatch {where} on {self.instance_id} w={self.workload:.4g} s>"


class PeerLoad(NamedTuple):
    """Load of another gateway on an instance. Units as above.

    ``observed_s``, ``modelled_s``: step time that it saw lately, and as modelled; both add up, and
    their quotient is the speed factor. ``prompts``, ``prompt_tokens``: counted since it began: the
    prompts between decode steps, and their tokens to compute. Replicas exchange the fields in this
    order (``core/sharing/message.py``): further fields come at the end.
    """

    load_s: float = 0.0
    kv_tokens: float = 0.0
    in_flight: float = 0.0
    waiting: float = 0.0
    streaming: float = 0.0
    waiting_prompt: float = 0.0
    waiting_prefill: float = 0.0
    waiting_output: float = 0.0
    context: float = 0.0
    observed_s: float = 0.0
    modelled_s: float = 0.0
    prompts: float = 0.0
    prompt_tokens: float = 0.0


NO_PEERS: Final = PeerLoad()
