"""One vLLM instance's engine in virtual time: continuous batching over a paged KV cache.

It knows sequences and steps, not elapsed seconds: its driver asks for the next step, lets
``duration_s`` pass on a clock of its own, and reports that the step has ended.

    engine.submit(sequence)
    while step := engine.begin_step():
        now_s += step.duration_s          # or: sleep
        result = engine.end_step()        # who emitted a token, who finished

Scheduling, after vllm/v1/core/sched/scheduler.py (chunked, the default) and vllm/core/scheduler.py
(prefill-first, vLLM V0):

- The waiting queue is first-come-first-served; its head blocks those behind it.
- ``chunked``: every decoding sequence gets one token of the step's budget, prompts share the rest,
  in chunks. ``prefill-first``: when a prompt can be admitted the step prefills whole prompts and
  nothing decodes.
- A sequence is admitted when the blocks of its whole prompt are free and a watermark of 1 % stays
  free beside them (waived when nothing runs); they are taken at once. vLLM V1 takes a chunked
  prompt's blocks chunk by chunk after the same check; taking them at once never admits more.
- A decoding sequence takes a block whenever its last one is full. When none is free, the newest
  running sequence is evicted: its blocks go, its tokens stay, and it waits at the head of the
  queue to have prompt and tokens prefilled again. A chunked step that evicts admits no one.

A prompt's last chunk emits a token, so O output tokens take O - 1 decode steps (erratum 12).
The newest token's KV is computed by the step that emits the next one, so a sequence of I prompt
tokens that has emitted k tokens decodes over I + k cached tokens, which is Eq. (4)'s I + k.

Step time (Eqs. 3 and 4 of the paper, section 4.1, and attention over the prompts), for m prompts
with n tokens in this step, u of one of them after C computed ones, and b decoding sequences with S
cached tokens in all:

    prefill   p1·n + p2·m + p3·n/m + p4 + p9·Σ u·(C + u/2)
    decode    p5·S + p6·b + p7·S/b + p8
    mixed     their sum, less min(p4, p8): the weights are read and the kernels launched once,
              so the fixed part is paid once, at the larger of the two fits
    experts   if a step decodes, less idle_expert_s·(experts_awake_at − b − n) while b + n tokens
              leave some experts unread

The rules themselves are functions in ``kernel.py``. This class drives them step by step, as needed
by an instance that must emit every token in time; ``fleet.py`` drives the same functions many steps
at once.

With ``prefix_caching`` a sequence whose blocks have keys shares those that are already cached
(``block_cache.py``): its prefill computes only the others, and its steps are charged for only
those. While it decodes, all of its tokens are context, cached or not.
"""

import math
from dataclasses import astuple, dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.sim import block_cache, kernel

Scheduling = Literal["chunked", "prefill-first"]

# vLLM's default budget of an online server on cards below 70 GiB (vllm/engine/arg_utils.py).
DEFAULT_MAX_BATCHED_TOKENS = 2048
# vLLM's default.
DEFAULT_BLOCK_TOKENS = 16
# vLLM V0's BlockSpaceManager default: blocks kept free at admission, so that the next step does not
# evict running sequences at once.
WATERMARK = 0.01


class _Number:
    """A field of the kernel's row of a sequence or an engine, as an attribute."""

    def __init__(self, field: int) -> None:
        self._field = field

    def __get__(self, of: "Sequence | Engine[Any]", _: type | None = None) -> int:
        return of._row[self._field]


class Sequence:
    """One prompt and the tokens generated for it; subclass it to carry more.

    Args:
        prompt_tokens: at least 1.
        output_tokens: how many tokens it will generate, at least 1.
        keys: of its first full blocks, prompt and output together, as far as known: not 0,
            below 2^62, and well distributed in their low bits. Read while it is in an engine.

    Raises:
        ValueError: a length below 1.
    """

    __slots__ = ("_keys", "_row", "_slot")

    prompt_tokens = _Number(kernel.PROMPT)
    output_tokens = _Number(kernel.OUTPUT)
    # NEW → WAITING → PREFILLING → DECODING → DONE; eviction leads back to WAITING, abort to DONE.
    state = _Number(kernel.STATE)
    preemptions = _Number(kernel.PREEMPTIONS)  # how often it was evicted
    # Prompt tokens in the prefix cache when it was first admitted.
    cached_tokens = _Number(kernel.CACHED_TOKENS)

    def __init__(
        self, prompt_tokens: int, output_tokens: int, keys: list[int] | None = None
    ) -> None:
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(f"lengths must be at least 1, got {prompt_tokens} and {output_tokens}")
        # The kernel's row of this sequence: in the engine's table from submit on.
        self._row = [0] * kernel.SEQUENCE_FIELDS
        self._row[kernel.PROMPT] = prompt_tokens
        self._row[kernel.OUTPUT] = output_tokens
        self._slot = -1
        self._keys = [] if keys is None else keys

    @property
    def prefill_tokens(self) -> int:
        """The tokens to prefill: the prompt, and after an eviction its generated tokens as well."""
        return self._row[kernel.PROMPT] + self._row[kernel.GENERATED]


S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """A planned step: its length, and its contents."""

    duration_s: float
    prefill_sequences: int
    prefill_tokens: int
    decode_sequences: int
    cached_tokens: int
    preempted: tuple[S, ...]


@dataclass(frozen=True, slots=True)
class StepResult(Generic[S]):
    """A step's result: ``emitted`` got one token each, and ``finished`` (among them) their last."""

    emitted: list[S]
    finished: list[S]


class EngineRules(TypedDict, total=False):
    """See ``Engine``."""

    scheduling: Scheduling
    max_num_seqs: int | None
    block_tokens: int
    max_batched_tokens: int
    slowdown: float
    prefix_caching: bool


def instance_rows(
    profile: Profile,
    heads: int,
    *,
    scheduling: Scheduling = "chunked",
    max_num_seqs: int | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    slowdown: float = 1.0,
    prefix_caching: bool = False,
) -> tuple[kernel.Row, kernel.Times]:
    """The kernel's rows of one idle instance; the arguments are those of ``Engine``.

    Args:
        heads: the first of three rows that are the heads of its lists.
    """
    if max_num_seqs is None:
        max_num_seqs = profile.max_num_seqs
    if min(max_num_seqs, block_tokens, max_batched_tokens) < 1:
        raise ValueError("max_num_seqs, block_tokens and max_batched_tokens must be at least 1")
    if scheduling == "chunked" and max_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_batched_tokens ({max_batched_tokens}) must be at least max_num_seqs "
            f"({max_num_seqs})"
        )
    total_blocks = profile.kv_capacity_tokens // block_tokens
    if total_blocks < 1:
        raise ValueError(f"{profile.kv_capacity_tokens} KV tokens make no block")
    n = [0] * (kernel.PHASES_AT + block_tokens + max_num_seqs)
    n[kernel.FREE_BLOCKS] = n[kernel.TOTAL_BLOCKS] = total_blocks
    n[kernel.BLOCK_TOKENS] = block_tokens
    n[kernel.WATERMARK_BLOCKS] = int(WATERMARK * total_blocks)
    n[kernel.MAX_SEQS] = max_num_seqs
    n[kernel.MAX_BATCHED] = max_batched_tokens
    n[kernel.CHUNKED] = int(scheduling == "chunked")
    n[kernel.CACHING] = int(prefix_caching)
    n[kernel.BUCKET_MASK] = block_cache.bucket_mask(total_blocks)
    n[kernel.INSTANCE] = heads // 3
    n[kernel.AHEAD] = int(profile.plans_ahead)
    n[kernel.HEAD_WAITING] = heads
    n[kernel.HEAD_PREFILLING] = heads + 1
    n[kernel.HEAD_DECODING] = heads + 2
    x = [*astuple(profile.constants), slowdown, 0.0, 0.0, 0.0, math.inf, 0.0]
    x += [profile.experts_awake_at, profile.spared_s]
    return n, x


def list_heads(first: int) -> kernel.Rows:
    """The rows ``first`` to ``first + 2``: the heads of three empty lists."""
    rows = [[0] * kernel.SEQUENCE_FIELDS for _ in range(3)]
    for slot, row in enumerate(rows, first):
        row[kernel.NEXT] = row[kernel.PREVIOUS] = slot
    return rows


class Engine(Generic[S]):
    """The engine of one instance, step by step.

    Args:
        profile: its constants, KV capacity and (unless given here) ``max_num_seqs``.
        scheduling: see the module's text.
        max_num_seqs: most sequences admitted at once.
        block_tokens: tokens per KV block.
        max_batched_tokens: most tokens in one step. In prefill-first mode a longer prompt is
            prefilled alone.
        slowdown: every step takes this many times longer; may be changed between steps.
        prefix_caching: keep computed blocks, and share them.

    Raises:
        ValueError: a size below 1, no room for one block, or (chunked) a token budget that
            could not hold every running sequence's decode.
    """

    max_num_seqs = _Number(kernel.MAX_SEQS)
    block_tokens = _Number(kernel.BLOCK_TOKENS)
    num_waiting = _Number(kernel.NUM_WAITING)
    free_blocks = _Number(kernel.FREE_BLOCKS)
    total_blocks = _Number(kernel.TOTAL_BLOCKS)
    preemptions_total = _Number(kernel.PREEMPTIONS_TOTAL)
    prompt_tokens_total = _Number(kernel.PROMPT_TOTAL)  # of prefilled prompts, each counted once
    generation_tokens_total = _Number(kernel.GENERATION_TOTAL)
    # Prompt tokens that were looked up in the prefix cache, and those found there.
    prefix_queries_total = _Number(kernel.QUERIES_TOTAL)
    prefix_hits_total = _Number(kernel.HITS_TOTAL)

    def __init__(self, profile: Profile, **rules: Unpack[EngineRules]) -> None:
        self._row, self._x = instance_rows(profile, 0, **rules)
        self._q = list_heads(0)
        self._c = [block_cache.cache_rows(self.total_blocks)] if self.prefix_caching else None
        self._k: kernel.Rows = [[] for _ in range(2 * len(self._q))]
        self._sequences: dict[int, S] = {}  # by slot
        self._free_slots: list[int] = []
        self._decoding: dict[int, S] = {}  # by slot, in the order of joining
        # A step logs at most two entries for each sequence that runs.
        entries = 2 * self.max_num_seqs + 1
        self._log = [0] * entries
        self._log_s = [0.0] * entries
        self._step: Step[S] | None = None

    # -- the public interface

    @property
    def slowdown(self) -> float:
        return self._x[kernel.SLOWDOWN]

    @slowdown.setter
    def slowdown(self, factor: float) -> None:
        self._x[kernel.SLOWDOWN] = factor

    @property
    def num_running(self) -> int:
        return self._row[kernel.NUM_PREFILLING] + self._row[kernel.NUM_DECODING]

    @property
    def kv_usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks

    @property
    def prefix_caching(self) -> bool:
        return bool(self._row[kernel.CACHING])

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks. False, without effect, while a block is in use."""
        n = self._row
        if n[kernel.FREE_BLOCKS] < n[kernel.TOTAL_BLOCKS]:
            return False
        if self._c is not None:
            block_cache.clear(self._c[0], n[kernel.BUCKET_MASK], n[kernel.TOTAL_BLOCKS])
        return True

    def generated_tokens(self, sequence: S) -> int:
        """Tokens that ``sequence`` has emitted so far."""
        row = sequence._row
        if row[kernel.STATE] == kernel.DECODING:
            return row[kernel.OFFSET] + self._row[kernel.EPOCH] - row[kernel.PROMPT]
        return row[kernel.GENERATED]

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether a sequence of these lengths can ever finish here (its last token needs no KV)."""
        return kernel.blocks(self._row, prompt_tokens + output_tokens - 1) <= self.total_blocks

    def submit(self, sequence: S) -> None:
        """Put a new sequence at the end of the waiting queue.

        Raises:
            ValueError: it was submitted before, or is larger than the whole cache.
        """
        if sequence.state != kernel.NEW:
            raise ValueError("the sequence was submitted before")
        if not self.fits(sequence.prompt_tokens, sequence.output_tokens):
            raise ValueError(
                f"{sequence.prompt_tokens} + {sequence.output_tokens} tokens do not fit "
                f"{self.total_blocks} blocks of {self.block_tokens}"
            )
        if self._free_slots:
            slot = self._free_slots.pop()
            self._q[slot] = sequence._row
        else:
            slot = len(self._q)
            self._q.append(sequence._row)
            self._k += [[], []]
        self._sequences[slot] = sequence
        sequence._slot = slot
        if self.prefix_caching:
            most = kernel.blocks(self._row, sequence.prompt_tokens + sequence.output_tokens)
            sequence._row[kernel.KEYS] = min(len(sequence._keys), most)
            self._k[2 * slot] = sequence._keys
            self._k[2 * slot + 1] = [0] * most
        kernel.enqueue(self._q, self._row, slot)

    def abort(self, sequence: S) -> None:
        """Drop a sequence and free its blocks at once, even within a step; a no-op when it is done.

        A step in progress keeps its length: the accelerator does not stop for it.
        """
        if sequence._slot >= 0:
            kernel.drop(self._q, self._row, self._c, self._k, sequence._slot)
            self._decoding.pop(sequence._slot, None)
            self._release(sequence)
        sequence._row[kernel.STATE] = kernel.DONE

    def begin_step(self) -> Step[S] | None:
        """Plan the next step; None if there is nothing to do.

        Raises:
            RuntimeError: the last step has not ended.
        """
        if self._step is not None:
            raise RuntimeError("end_step() must come before the next begin_step()")
        n, log = self._row, self._log
        log[0] = 0
        if not kernel.plan(self._q, n, self._x, self._c, self._k, log, self._log_s, 0.0):
            return None
        n[kernel.STEPS] = 1
        preempted = []
        for entry in log[1 : 1 + log[0]]:
            slot = entry // 4
            preempted.append(self._sequences[slot])
            self._decoding.pop(slot, None)
        self._step = Step(
            self._x[kernel.FIRST_S],
            n[kernel.STEP_PROMPTS],
            n[kernel.STEP_TOKENS],
            n[kernel.STEP_DECODES],
            n[kernel.STEP_CACHED],
            tuple(preempted),
        )
        return self._step

    def end_step(self) -> StepResult[S]:
        """Apply the step that ``begin_step`` planned; sequences aborted meanwhile emit nothing.

        Raises:
            RuntimeError: no step is in progress.
        """
        step = self._step
        if step is None:
            raise RuntimeError("no step is under way")
        self._step = None
        log = self._log
        log[0] = 0
        emitted = list(self._decoding.values()) if step.decode_sequences else []
        finished: list[S] = []
        kernel.end(self._q, self._row, self._x, self._c, self._k, log, self._log_s, 0.0)
        for entry in log[1 : 1 + log[0]]:
            slot, kind = entry // 4, entry % 4
            sequence = self._sequences[slot]
            if kind == kernel.FINISHED:
                finished.append(sequence)
                self._decoding.pop(slot, None)
                self._release(sequence)
            else:
                emitted.append(sequence)
                self._decoding[slot] = sequence
        return StepResult(emitted, finished)

    def _release(self, sequence: S) -> None:
        del self._sequences[sequence._slot]
        self._k[2 * sequence._slot] = self._k[2 * sequence._slot + 1] = []
        self._free_slots.append(sequence._slot)
        sequence._slot = -1
