"""One vLLM instance's engine in virtual time: continuous batching over a paged KV cache.

The emulated server and the simulator drive this one class. It knows sequences and steps, not
seconds that have passed: whoever drives it asks for the next step, lets ``duration_s`` go by on
a clock of its own, and says that the step has ended.

    engine.submit(sequence)
    while step := engine.begin_step():
        now_s += step.duration_s          # or: sleep
        result = engine.end_step()        # who emitted a token, who finished

Scheduling, after vllm/v1/core/sched/scheduler.py (chunked, the default) and vllm/core/scheduler.py
(prefill-first, vLLM V0):

- The waiting queue is first-come-first-served; its head blocks those behind it.
- ``chunked``: every decoding sequence gets one token of the step's budget, prompts share what is
  left, in chunks. ``prefill-first``: when a prompt can be admitted the step prefills whole
  prompts and nothing decodes.
- A sequence is admitted when the blocks of its whole prompt are free and a watermark of 1 % stays
  free beside them (waived when nothing runs); they are taken at once. vLLM V1 takes a chunked
  prompt's blocks chunk by chunk after the same check; taking them at once never admits more.
- A decoding sequence takes a block whenever its last one is full. When none is free, the newest
  running sequence is evicted: its blocks go, its tokens stay, and it waits at the head of the
  queue to have prompt and tokens prefilled again. A chunked step that evicts admits no one.

A prompt's last chunk emits a token, so O output tokens take O - 1 decode steps (erratum 12).
The newest token's KV is computed by the step that emits the next one, so a sequence of I prompt
tokens that has emitted k tokens decodes over I + k cached tokens, which is Eq. (4)'s I + k.

Step time (Eqs. 3 and 4 of the paper, section 4.1), for m prompts with n tokens in this step and
b decoding sequences with S cached tokens in all:

    prefill   p1·n + p2·m + p3·n/m + p4
    decode    p5·S + p6·b + p7·S/b + p8
    mixed     their sum, less min(p4, p8): the weights are read and the kernels launched once,
              so the fixed part is paid once, at the larger of the two fits

A decode step costs O(1) plus the sequences that join, leave or are listed in the result: S grows
by b a step, block needs are counted per residue of the step number, and finishes lie in a heap.
That is also the seam for advancing many decode steps in closed form: until the next finish
(``_finishes``) or shortage of blocks (``_block_phases``) nothing else changes.

Not modelled: prefix caching, attention over a prompt's earlier chunks (Eq. 3 has no such term).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Literal, TypeVar

from hetero_gateway.core.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.core.profile import Constants, Profile

Scheduling = Literal["chunked", "prefill-first"]

# vLLM's default budget of an online server on cards below 70 GiB (vllm/engine/arg_utils.py).
DEFAULT_MAX_BATCHED_TOKENS = 2048
# vLLM V0's BlockSpaceManager default: blocks kept free at admission, so that the sequences already
# running are not evicted by the very next step.
WATERMARK = 0.01


class State(Enum):
    """Where a sequence is; it moves NEW → WAITING → PREFILLING → DECODING → DONE.

    Eviction leads back to WAITING, abort from anywhere to DONE.
    """

    NEW = 0
    WAITING = 1
    PREFILLING = 2
    DECODING = 3
    DONE = 4


class Sequence:
    """One prompt and the tokens generated for it; subclass it to carry more.

    Args:
        prompt_tokens: at least 1.
        output_tokens: how many tokens it will generate, at least 1.

    Raises:
        ValueError: a length below 1.
    """

    __slots__ = (
        "_finish_epoch",
        "_generated",
        "_join",
        "_offset",
        "computed_tokens",
        "output_tokens",
        "preemptions",
        "prompt_tokens",
        "state",
    )

    def __init__(self, prompt_tokens: int, output_tokens: int) -> None:
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(f"lengths must be at least 1, got {prompt_tokens} and {output_tokens}")
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.state = State.NEW
        self.preemptions = 0
        self.computed_tokens = 0  # of its prefill; means nothing while it decodes
        self._generated = 0  # at the time it last left the decoding batch
        self._finish_epoch = 0  # of the decode epoch in which its last token is emitted
        self._offset = 0  # cached tokens = _offset + decode epoch
        self._join = 0  # tells this stay in the decoding batch from earlier ones

    @property
    def prefill_tokens(self) -> int:
        """What a prefill must compute: the prompt, and after an eviction its tokens as well."""
        return self.prompt_tokens + self._generated


S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """A step that has been planned: its length, and what is in it."""

    duration_s: float
    prefill_sequences: int
    prefill_tokens: int
    decode_sequences: int
    cached_tokens: int
    preempted: tuple[S, ...]


@dataclass(frozen=True, slots=True)
class StepResult(Generic[S]):
    """What a step did: ``emitted`` got one token each, and ``finished`` (among them) their last."""

    emitted: list[S]
    finished: list[S]


def step_time_s(
    c: Constants,
    prefill_sequences: int,
    prefill_tokens: int,
    decode_sequences: int,
    cached_tokens: int,
) -> float:
    """The length of a step of m prompts (n tokens) and b decodes (S cached tokens in all)."""
    time_s = 0.0
    if prefill_sequences:
        time_s += prefill_time_s(c, prefill_sequences, prefill_tokens / prefill_sequences)
    if decode_sequences:
        time_s += decode_step_time_s(c, decode_sequences, cached_tokens / decode_sequences)
        if prefill_sequences:
            time_s -= min(c.p4, c.p8)
    return time_s


class Engine(Generic[S]):
    """The engine of one instance.

    Args:
        profile: its constants, KV capacity and (unless given here) ``max_num_seqs``.
        scheduling: see the module's text.
        max_num_seqs: most sequences admitted at once.
        block_tokens: tokens per KV block.
        max_batched_tokens: most tokens in one step. In prefill-first mode a longer prompt is
            prefilled alone.
        slowdown: every step takes this many times longer; may be changed between steps.

    Raises:
        ValueError: a size below 1, no room for one block, or (chunked) a token budget that could
            not hold every running sequence's decode.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        scheduling: Scheduling = "chunked",
        max_num_seqs: int | None = None,
        block_tokens: int = 16,
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        slowdown: float = 1.0,
    ) -> None:
        self.constants = profile.constants
        self.scheduling: Scheduling = scheduling
        self.max_num_seqs = profile.max_num_seqs if max_num_seqs is None else max_num_seqs
        self.block_tokens = block_tokens
        self.max_batched_tokens = max_batched_tokens
        self.slowdown = slowdown
        if min(self.max_num_seqs, block_tokens, max_batched_tokens) < 1:
            raise ValueError("max_num_seqs, block_tokens and max_batched_tokens must be at least 1")
        if scheduling == "chunked" and max_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batched_tokens ({max_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs})"
            )
        self.total_blocks = profile.kv_capacity_tokens // block_tokens
        if self.total_blocks < 1:
            raise ValueError(f"{profile.kv_capacity_tokens} KV tokens make no block")
        self.free_blocks = self.total_blocks
        self._watermark_blocks = int(WATERMARK * self.total_blocks)
        self._waiting: OrderedDict[S, None] = OrderedDict()
        self._prefilling: OrderedDict[S, None] = OrderedDict()
        self._decoding: OrderedDict[S, None] = OrderedDict()
        self._cached_tokens = 0  # over the decoding sequences: prompt and emitted tokens
        self._epoch = 0  # decode steps ended
        self._joins = 0
        self._block_phases = [0] * block_tokens
        self._finishes: list[tuple[int, int, S]] = []
        self._step: Step[S] | None = None
        self._chunks: list[tuple[S, int]] = []
        self.preemptions_total = 0
        self.prompt_tokens_total = 0  # prefilled prompts, each counted once
        self.generation_tokens_total = 0

    # -- what the outside sees

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks

    def generated_tokens(self, sequence: S) -> int:
        """Tokens that ``sequence`` has emitted so far."""
        if sequence.state is State.DECODING:
            return sequence._offset + self._epoch - sequence.prompt_tokens
        return sequence._generated

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether a sequence of these lengths can ever finish here (its last token needs no KV)."""
        return self._blocks(prompt_tokens + output_tokens - 1) <= self.total_blocks

    def submit(self, sequence: S) -> None:
        """Put a new sequence at the end of the waiting queue.

        Raises:
            ValueError: it was submitted before, or is larger than the whole cache.
        """
        if sequence.state is not State.NEW:
            raise ValueError("the sequence was submitted before")
        if not self.fits(sequence.prompt_tokens, sequence.output_tokens):
            raise ValueError(
                f"{sequence.prompt_tokens} + {sequence.output_tokens} tokens do not fit "
                f"{self.total_blocks} blocks of {self.block_tokens}"
            )
        sequence.state = State.WAITING
        self._waiting[sequence] = None

    def abort(self, sequence: S) -> None:
        """Drop a sequence and free its blocks at once, within a step too; a no-op when it is done.

        A step under way keeps its length: the accelerator does not stop for it.
        """
        if sequence.state is State.WAITING:
            del self._waiting[sequence]
        elif sequence.state is State.PREFILLING:
            del self._prefilling[sequence]
            self.free_blocks += self._blocks(sequence.prefill_tokens)
        elif sequence.state is State.DECODING:
            del self._decoding[sequence]
            self._leave(sequence)
        sequence.state = State.DONE

    def begin_step(self) -> Step[S] | None:
        """Plan the next step; None when there is nothing to do.

        Raises:
            RuntimeError: the last step has not ended.
        """
        if self._step is not None:
            raise RuntimeError("end_step() must come before the next begin_step()")
        preempted: tuple[S, ...] = ()
        decodes = 0
        if self.scheduling == "chunked":
            preempted = self._grow()
            decodes = len(self._decoding)
            self._plan_chunks(self.max_batched_tokens - decodes, admit=not preempted)
        else:
            self._plan_prompts()
            if not self._chunks:
                preempted = self._grow()
                decodes = len(self._decoding)
        if not decodes and not self._chunks:
            return None
        prompts = len(self._chunks)
        prompt_tokens = sum(tokens for _, tokens in self._chunks)
        cached_tokens = self._cached_tokens if decodes else 0
        self._step = Step(
            self.slowdown
            * step_time_s(self.constants, prompts, prompt_tokens, decodes, cached_tokens),
            prompts,
            prompt_tokens,
            decodes,
            cached_tokens,
            preempted,
        )
        return self._step

    def end_step(self) -> StepResult[S]:
        """Apply the step that ``begin_step`` planned; sequences aborted meanwhile emit nothing.

        Raises:
            RuntimeError: no step is under way.
        """
        step = self._step
        if step is None:
            raise RuntimeError("no step is under way")
        self._step = None
        emitted: list[S] = []
        finished: list[S] = []
        if step.decode_sequences:
            emitted.extend(self._decoding)
            self._epoch += 1
            self._cached_tokens += len(emitted)
            self._pop_finished(finished)
        for sequence, tokens in self._chunks:
            if sequence.state is not State.PREFILLING:
                continue
            sequence.computed_tokens += tokens
            if sequence.computed_tokens == sequence.prefill_tokens:
                emitted.append(sequence)
                self._first_token(sequence, finished)
        self._chunks = []
        self.generation_tokens_total += len(emitted)
        return StepResult(emitted, finished)

    # -- planning

    def _plan_chunks(self, budget: int, *, admit: bool) -> None:
        for sequence in self._prefilling:
            if budget < 1:
                return
            tokens = min(sequence.prefill_tokens - sequence.computed_tokens, budget)
            self._chunks.append((sequence, tokens))
            budget -= tokens
        while admit and budget > 0 and (head := self._admissible()) is not None:
            self._admit(head)
            tokens = min(head.prefill_tokens, budget)
            self._chunks.append((head, tokens))
            budget -= tokens

    def _plan_prompts(self) -> None:
        budget = self.max_batched_tokens
        while (head := self._admissible()) is not None:
            tokens = head.prefill_tokens
            if self._chunks and tokens > budget:
                return
            self._admit(head)
            self._chunks.append((head, tokens))
            budget -= tokens

    def _admissible(self) -> S | None:
        """The head of the queue, when there is a slot and room for it."""
        if not self._waiting or self.num_running >= self.max_num_seqs:
            return None
        head = next(iter(self._waiting))
        spare = self.free_blocks - self._blocks(head.prefill_tokens)
        return head if spare >= (self._watermark_blocks if self.num_running else 0) else None

    def _admit(self, head: S) -> None:
        del self._waiting[head]
        self._prefilling[head] = None
        head.state = State.PREFILLING
        head.computed_tokens = 0
        self.free_blocks -= self._blocks(head.prefill_tokens)

    def _grow(self) -> tuple[S, ...]:
        """Give every decoding sequence room for its next token; evict the newest while it lacks."""
        if not self._decoding:
            return ()
        preempted: list[S] = []
        phase = self._epoch % self.block_tokens
        while self._block_phases[phase] > self.free_blocks:
            preempted.append(self._evict_newest())
        self.free_blocks -= self._block_phases[phase]
        return tuple(preempted)

    def _evict_newest(self) -> S:
        # Prompts are prefilled in the order of admission, so those at it are newer than all others.
        if self._prefilling:
            victim, _ = self._prefilling.popitem()
            self.free_blocks += self._blocks(victim.prefill_tokens)
        else:
            victim, _ = self._decoding.popitem()
            self._leave(victim)
        victim.state = State.WAITING
        victim.preemptions += 1
        self.preemptions_total += 1
        self._waiting[victim] = None
        self._waiting.move_to_end(victim, last=False)
        return victim

    # -- the decoding batch

    def _first_token(self, sequence: S, finished: list[S]) -> None:
        """A prefill is over and emits a token: the first, or after an eviction the next."""
        del self._prefilling[sequence]
        if sequence._generated == 0:
            self.prompt_tokens_total += sequence.prompt_tokens
        held = self._blocks(sequence.prefill_tokens)
        sequence._generated += 1
        if sequence._generated == sequence.output_tokens:
            self.free_blocks += held
            sequence.state = State.DONE
            finished.append(sequence)
            return
        cached_tokens = sequence.prompt_tokens + sequence._generated
        self._joins += 1
        sequence.state = State.DECODING
        sequence._join = self._joins
        sequence._offset = cached_tokens - self._epoch
        sequence._finish_epoch = self._epoch + sequence.output_tokens - sequence._generated
        self._decoding[sequence] = None
        self._cached_tokens += cached_tokens
        self._block_phases[self._phase(sequence)] += 1
        heapq.heappush(self._finishes, (sequence._finish_epoch, sequence._join, sequence))

    def _leave(self, sequence: S) -> None:
        """Account for a sequence that is no longer in ``_decoding``, and free its blocks."""
        cached_tokens = sequence._offset + self._epoch
        sequence._generated = cached_tokens - sequence.prompt_tokens
        self._cached_tokens -= cached_tokens
        self._block_phases[self._phase(sequence)] -= 1
        # All but the newest token have KV; within a decode step there is room for that one too.
        growing = self._step is not None and self._step.decode_sequences > 0
        self.free_blocks += self._blocks(cached_tokens if growing else cached_tokens - 1)

    def _pop_finished(self, finished: list[S]) -> None:
        while self._finishes and self._finishes[0][0] <= self._epoch:
            _, join, sequence = heapq.heappop(self._finishes)
            if sequence.state is State.DECODING and sequence._join == join:
                del self._decoding[sequence]
                self._leave(sequence)
                sequence.state = State.DONE
                finished.append(sequence)

    def _phase(self, sequence: S) -> int:
        """The residue of the decode epochs in which it needs a new block."""
        return (1 - sequence._offset) % self.block_tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)
