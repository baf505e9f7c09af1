"""The engine's rules on tables of numbers: plan a step, end a run of steps, advance many engines.

``engine.py`` (one instance, step by step) and ``fleet.py`` (all instances of a cluster, in virtual
time) are the only drivers of these functions. ``engine.py`` explains what a step does and costs.
The functions index rows and do arithmetic, and nothing else: so they run on lists as plain Python,
and on numpy arrays when numba compiles them (``fleet.compile_kernel``), with the same results to
the last bit.

    q[slot]  one sequence: integers, the fields PROMPT, OUTPUT, …; or the head of a list
    k[2·slot], k[2·slot + 1]  its blocks' keys, and its blocks; only with a prefix cache
    n[i]     one instance: integers, the fields FREE_BLOCKS, …, then block phases, then a heap
    x[i]     one instance: floats, the fields P1, …
    c[i]     one instance: its blocks, see ``block_cache.py``; None if nobody has a prefix cache:
             then numba leaves out the code for them
    log      what happened: log[0] counts the entries, log[1], … are slot · 4 + kind
    log_s    when: log_s[1], …

A running or waiting sequence is in one of three doubly linked lists of its instance, which form a
ring through a head that is itself a row of ``q``.

A decode run is advanced in closed form. A step of b sequences with S cached tokens takes
A + p5·S + p7·S/b with A = p6·b + p8, S grows by b a step, so k steps take

    k·(A + p5·S + p7·S/b) + (p5·b + p7)·k(k−1)/2

A run ends at the next finish (the heap's top), at the next shortage of blocks (counted per residue
of the step number), or at the end of the current step when something arrives or the slow-down
changes.
"""

import math

from hetero_gateway.sim.block_cache import SPARE, count_free, keep, look_up, release, share, take

Row = list[int]
Rows = list[list[int]]
Times = list[float]
TimeRows = list[list[float]]
Kept = list[Rows] | None

# Fields of a sequence's row. A cached token is one of the prompt or an emitted one; a decoding
# sequence has OFFSET + the instance's EPOCH of them. JOIN orders the stays in the decoding batch.
PROMPT, OUTPUT, GENERATED, COMPUTED, CHUNK, OFFSET, LAST_EPOCH, JOIN = range(8)
HEAP_AT, PREEMPTIONS, STATE, NEXT, PREVIOUS = range(8, 13)
# With a prefix cache. KEYS: how many blocks have a key; HITS: blocks found by the last look-up;
# KEPT: blocks that others can find; HELD: blocks taken at admission; CACHED_TOKENS: found at the
# first admission.
KEYS, HITS, KEPT, HELD, CACHED_TOKENS = range(13, 18)
# Of a leg. FETCHED: prompt tokens whose KV came from elsewhere; PINS: 1 if its blocks stay when it
# is done, until they are fetched.
FETCHED, PINS = range(18, 20)
# If steps are planned ahead: the number of the step in progress when it came; -1: none.
CAME_IN = 20
SEQUENCE_FIELDS = 21

# Values of STATE.
NEW, WAITING, PREFILLING, DECODING, DONE = range(5)

# Fields of an instance's integers. NUM_*: how many sequences are in that state. STEP_*: contents of
# the planned or current step; STEPS of them follow each other, 0 when none is.
FREE_BLOCKS, TOTAL_BLOCKS, BLOCK_TOKENS, WATERMARK_BLOCKS = range(4)
MAX_SEQS, MAX_BATCHED, CHUNKED = range(4, 7)
HEAD_WAITING, HEAD_PREFILLING, HEAD_DECODING = range(7, 10)
NUM_WAITING, NUM_PREFILLING, NUM_DECODING = range(10, 13)
EPOCH, CACHED, JOINS = range(13, 16)
STEPS, STEP_DECODES, STEP_CACHED, STEP_PROMPTS, STEP_TOKENS = range(16, 21)
PREEMPTIONS_TOTAL, PROMPT_TOTAL, GENERATION_TOTAL = range(21, 24)
PHASE = 24
# Of the prefix cache: whether there is one; tokens looked up and found; blocks on its stack.
CACHING, BUCKET_MASK, QUERIES_TOTAL, HITS_TOTAL, SPARES = range(25, 30)
INSTANCE = 30  # its place in ``c``
# AHEAD: 1 if a step is planned while the one before it runs; how many have ENDED.
AHEAD, ENDED = range(31, 33)
PHASES_AT = 33  # BLOCK_TOKENS counters, then a heap of MAX_SEQS slots

# Fields of an instance's floats. START_S: of the run; FIRST_S: its first step; GROWTH_S: how much
# longer each step is than the one before. DECODE_S: time spent so far in steps that decode.
P1, P2, P3, P4, P5, P6, P7, P8, P9 = range(9)
SLOWDOWN, START_S, FIRST_S, GROWTH_S, NEXT_S, DECODE_S = range(9, 15)
# Of a mixture of experts, as in ``Profile``.
AWAKE_AT, IDLE_EXPERT_S = range(15, 17)

# Values of PHASE: the event at NEXT_S. At one time, steps end before others begin, so that a
# caller's actions at that time are seen by the steps that begin then.
END, BEGIN = 0, 1

# Kinds of log entries. FIRST: its first token; RESUMED: the token of a prefill after an eviction.
FIRST, RESUMED, FINISHED, PREEMPTED = range(4)


def record(log: Row, log_s: Times, now_s: float, slot: int, kind: int) -> None:
    log[0] += 1
    log[log[0]] = slot * 4 + kind
    log_s[log[0]] = now_s


# -- lists


def link(q: Rows, slot: int, before: int) -> None:
    """Insert a sequence before another one; before the head means at the end."""
    ahead = q[before]
    s = q[slot]
    previous = ahead[PREVIOUS]
    s[NEXT] = before
    s[PREVIOUS] = previous
    q[previous][NEXT] = slot
    ahead[PREVIOUS] = slot


def unlink(q: Rows, slot: int) -> None:
    s = q[slot]
    q[s[PREVIOUS]][NEXT] = s[NEXT]
    q[s[NEXT]][PREVIOUS] = s[PREVIOUS]


# -- the heap of decoding sequences, by the epoch that emits their last token


def finishes_before(q: Rows, one: int, other: int) -> bool:
    a, b = q[one], q[other]
    if a[LAST_EPOCH] != b[LAST_EPOCH]:
        return a[LAST_EPOCH] < b[LAST_EPOCH]
    return a[JOIN] < b[JOIN]


def sift(q: Rows, n: Row, size: int, at: int, slot: int) -> None:
    """Put a sequence into the hole ``at`` of a heap of ``size`` places, or where it belongs."""
    heap = PHASES_AT + n[BLOCK_TOKENS]
    while at > 0:
        parent = (at - 1) // 2
        if not finishes_before(q, slot, n[heap + parent]):
            break
        n[heap + at] = n[heap + parent]
        q[n[heap + at]][HEAP_AT] = at
        at = parent
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and finishes_before(q, n[heap + child + 1], n[heap + child]):
            child += 1
        if not finishes_before(q, n[heap + child], slot):
            break
        n[heap + at] = n[heap + child]
        q[n[heap + at]][HEAP_AT] = at
        at = child
    n[heap + at] = slot
    q[slot][HEAP_AT] = at


# -- the decoding batch


def blocks(n: Row, tokens: int) -> int:
    return -(-tokens // n[BLOCK_TOKENS])


def prefill_tokens(q: Rows, slot: int) -> int:
    """The tokens to prefill: the prompt, and after an eviction its generated tokens as well."""
    return q[slot][PROMPT] + q[slot][GENERATED]


def join_decoding(q: Rows, n: Row, slot: int) -> None:
    size = n[NUM_DECODING]
    cached = prefill_tokens(q, slot)
    s = q[slot]
    n[JOINS] += 1
    s[STATE] = DECODING
    s[JOIN] = n[JOINS]
    s[OFFSET] = cached - n[EPOCH]
    s[LAST_EPOCH] = n[EPOCH] + s[OUTPUT] - s[GENERATED]
    link(q, slot, n[HEAD_DECODING])
    sift(q, n, size + 1, size, slot)
    n[NUM_DECODING] = size + 1
    n[CACHED] += cached
    # The residue of the epochs in which it needs a new block.
    n[PHASES_AT + (1 - s[OFFSET]) % n[BLOCK_TOKENS]] += 1


def leave_decoding(q: Rows, n: Row, c: Kept, k: Rows, slot: int) -> None:
    """Take a sequence out of the batch, record its progress, and free its blocks."""
    unlink(q, slot)
    s = q[slot]
    size = n[NUM_DECODING] - 1
    n[NUM_DECODING] = size
    at = s[HEAP_AT]
    if at < size:
        sift(q, n, size, at, n[PHASES_AT + n[BLOCK_TOKENS] + size])
    cached = s[OFFSET] + n[EPOCH]
    s[GENERATED] = cached - s[PROMPT]
    n[CACHED] -= cached
    n[PHASES_AT + (1 - s[OFFSET]) % n[BLOCK_TOKENS]] -= 1
    # All tokens but the newest have KV; within a decode step there is room for that one too.
    growing = n[STEPS] > 0 and n[STEP_DECODES] > 0
    tokens = cached if growing else cached - 1
    if c is not None and n[CACHING]:
        keep_answer(q, n, c[n[INSTANCE]], k, slot, tokens)
    free(q, n, c, k, slot, tokens)


def free(q: Rows, n: Row, c: Kept, k: Rows, slot: int, tokens: int) -> None:
    """Free the blocks of a sequence that has KV for so many tokens."""
    count = blocks(n, tokens)
    if c is not None and n[CACHING]:
        count = release(c[n[INSTANCE]], n[TOTAL_BLOCKS], k[2 * slot + 1], count)
    n[FREE_BLOCKS] += count


def use(n: Row, c: Kept, count: int) -> None:
    """Take free blocks for the decoding sequences; the owners are settled as they leave."""
    n[FREE_BLOCKS] -= count
    if c is not None and n[CACHING]:
        cache = c[n[INSTANCE]]
        spares, mask, head = cache[SPARE], n[BUCKET_MASK], n[TOTAL_BLOCKS]
        for spare in range(n[SPARES], n[SPARES] + count):
            spares[spare] = take(cache, mask, head)
        n[SPARES] += count


def keep_full(q: Rows, n: Row, c: Rows, k: Rows, slot: int, tokens: int) -> None:
    """A sequence's blocks that so many tokens fill can be found from now on."""
    s, mask = q[slot], n[BUCKET_MASK]
    keys, held, full = k[2 * slot], k[2 * slot + 1], min(tokens // n[BLOCK_TOKENS], s[KEYS])
    for i in range(s[KEPT], full):
        keep(c, mask, held[i], keys[i])
    s[KEPT] = max(s[KEPT], full)


def keep_answer(q: Rows, n: Row, c: Rows, k: Rows, slot: int, tokens: int) -> None:
    """A sequence leaves the batch: its share of the blocks in use becomes its own."""
    for i in range(q[slot][HELD], blocks(n, tokens)):
        n[SPARES] -= 1
        k[2 * slot + 1][i] = c[SPARE][n[SPARES]]
    keep_full(q, n, c, k, slot, tokens)


def drop(q: Rows, n: Row, c: Kept, k: Rows, slot: int) -> None:
    """Abort a sequence and free its blocks at once; the current step keeps its length."""
    state = q[slot][STATE]
    if state == WAITING:
        unlink(q, slot)
        n[NUM_WAITING] -= 1
    elif state == PREFILLING:
        unlink(q, slot)
        n[NUM_PREFILLING] -= 1
        free(q, n, c, k, slot, prefill_tokens(q, slot))
    elif state == DECODING:
        leave_decoding(q, n, c, k, slot)
    q[slot][STATE] = DONE


# -- planning


def enqueue(q: Rows, n: Row, slot: int) -> None:
    """Put a new sequence at the end of the waiting queue."""
    q[slot][STATE] = WAITING
    q[slot][CAME_IN] = n[ENDED] + 1 if n[STEPS] > 0 else -1
    link(q, slot, n[HEAD_WAITING])
    n[NUM_WAITING] += 1


def comes_too_late(q: Rows, n: Row) -> bool:
    """Whether the head of the waiting queue came while the step before this one ran, when this one
    was already planned. If nothing runs, nothing was planned.
    """
    if n[AHEAD] == 0 or n[NUM_WAITING] == 0 or n[NUM_PREFILLING] + n[NUM_DECODING] == 0:
        return False
    return q[q[n[HEAD_WAITING]][NEXT]][CAME_IN] == n[ENDED]


def admissible(q: Rows, n: Row, c: Kept, k: Rows) -> bool:
    """Whether there is a slot and room for the head of the waiting queue; looks up its prompt."""
    running = n[NUM_PREFILLING] + n[NUM_DECODING]
    if n[NUM_WAITING] == 0 or running >= n[MAX_SEQS] or comes_too_late(q, n):
        return False
    slot = q[n[HEAD_WAITING]][NEXT]
    needed = blocks(n, prefill_tokens(q, slot))
    if c is not None and n[CACHING]:
        cache, held = c[n[INSTANCE]], k[2 * slot + 1]
        most = min(q[slot][KEYS], (prefill_tokens(q, slot) - 1) // n[BLOCK_TOKENS])
        hits = look_up(cache, n[BUCKET_MASK], k[2 * slot], held, most)
        q[slot][HITS] = hits
        # A free block that is shared is no longer free.
        needed -= hits - count_free(cache, held, hits)
    if running > 0:
        needed += n[WATERMARK_BLOCKS]
    return needed <= n[FREE_BLOCKS]


def admit(q: Rows, n: Row, c: Kept, k: Rows) -> int:
    """Move the head of the waiting queue to the prompts at prefill; returns its slot."""
    slot = q[n[HEAD_WAITING]][NEXT]
    unlink(q, slot)
    link(q, slot, n[HEAD_PREFILLING])
    n[NUM_WAITING] -= 1
    n[NUM_PREFILLING] += 1
    q[slot][STATE] = PREFILLING
    q[slot][COMPUTED] = 0
    if c is not None and n[CACHING]:
        begin_with_hits(q, n, c[n[INSTANCE]], k, slot)
    else:
        n[FREE_BLOCKS] -= blocks(n, prefill_tokens(q, slot))
    # After an eviction fetched KV is gone: then everything is computed here.
    if q[slot][PREEMPTIONS] == 0 and q[slot][FETCHED] > q[slot][COMPUTED]:
        q[slot][COMPUTED] = q[slot][FETCHED]
    return slot


def begin_with_hits(q: Rows, n: Row, c: Rows, k: Rows, slot: int) -> None:
    """Share the blocks that the look-up found, and take the others."""
    s = q[slot]
    hits, count = s[HITS], blocks(n, prefill_tokens(q, slot))
    held = k[2 * slot + 1]
    n[FREE_BLOCKS] -= count - hits + count_free(c, held, hits)
    share(c, held, hits)
    mask, head = n[BUCKET_MASK], n[TOTAL_BLOCKS]
    for i in range(hits, count):
        held[i] = take(c, mask, head)
    s[HELD] = count
    s[KEPT] = hits
    s[COMPUTED] = hits * n[BLOCK_TOKENS]
    # vLLM counts the look-ups of evicted sequences separately.
    if s[PREEMPTIONS] == 0:
        s[CACHED_TOKENS] = s[COMPUTED]
        n[QUERIES_TOTAL] += s[PROMPT]
        n[HITS_TOTAL] += s[COMPUTED]


def take_chunk(q: Rows, n: Row, c: Kept, k: Rows, slot: int, tokens: int) -> None:
    q[slot][CHUNK] = tokens
    if c is not None and n[CACHING]:
        keep_full(q, n, c[n[INSTANCE]], k, slot, q[slot][COMPUTED] + tokens)
    n[STEP_PROMPTS] += 1
    n[STEP_TOKENS] += tokens


def plan_chunks(q: Rows, n: Row, c: Kept, k: Rows, budget: int, admitting: bool) -> None:
    """Share ``budget`` tokens among the prompts at prefill, then among those waiting."""
    head = n[HEAD_PREFILLING]
    slot = q[head][NEXT]
    while slot != head and budget > 0:
        tokens = min(prefill_tokens(q, slot) - q[slot][COMPUTED], budget)
        take_chunk(q, n, c, k, slot, tokens)
        budget -= tokens
        slot = q[slot][NEXT]
    while admitting and budget > 0 and admissible(q, n, c, k):
        slot = admit(q, n, c, k)
        tokens = min(prefill_tokens(q, slot) - q[slot][COMPUTED], budget)
        take_chunk(q, n, c, k, slot, tokens)
        budget -= tokens


def plan_prompts(q: Rows, n: Row, c: Kept, k: Rows) -> None:
    """Admit whole prompts within the budget; a longer one alone."""
    budget = n[MAX_BATCHED]
    while admissible(q, n, c, k):
        slot = q[n[HEAD_WAITING]][NEXT]
        tokens = prefill_tokens(q, slot) - q[slot][HITS] * n[BLOCK_TOKENS]
        if n[STEP_PROMPTS] > 0 and tokens > budget:
            return
        take_chunk(q, n, c, k, admit(q, n, c, k), tokens)
        budget -= tokens


def evict_newest(q: Rows, n: Row, c: Kept, k: Rows) -> int:
    """Send the newest running sequence back to the head of the queue; returns its slot."""
    # Prompts are prefilled in the order of admission, so those at it are newer than all others.
    if n[NUM_PREFILLING] > 0:
        slot = q[n[HEAD_PREFILLING]][PREVIOUS]
        unlink(q, slot)
        n[NUM_PREFILLING] -= 1
        free(q, n, c, k, slot, prefill_tokens(q, slot))
    else:
        slot = q[n[HEAD_DECODING]][PREVIOUS]
        leave_decoding(q, n, c, k, slot)
    q[slot][STATE] = WAITING
    q[slot][PREEMPTIONS] += 1
    n[PREEMPTIONS_TOTAL] += 1
    link(q, slot, q[n[HEAD_WAITING]][NEXT])
    n[NUM_WAITING] += 1
    return slot


def grow(q: Rows, n: Row, c: Kept, k: Rows, log: Row, log_s: Times, now_s: float) -> bool:
    """Give every decoding sequence room for its next token; True when some had to be evicted."""
    evicted = False
    phase = PHASES_AT + n[EPOCH] % n[BLOCK_TOKENS]
    while n[phase] > n[FREE_BLOCKS]:
        record(log, log_s, now_s, evict_newest(q, n, c, k), PREEMPTED)
        evicted = True
    use(n, c, n[phase])
    return evicted


def run_length(q: Rows, n: Row) -> int:
    """Decode steps until the next finish, or until one more would lack blocks; at least 1.

    ``grow`` has taken the blocks of the first step; those of the others are taken at the end.
    """
    size = n[BLOCK_TOKENS]
    batch = n[NUM_DECODING]
    more = q[n[PHASES_AT + size]][LAST_EPOCH] - n[EPOCH] - 1
    # In every round of `size` steps each sequence takes one block.
    if (more // size + 1) * batch <= n[FREE_BLOCKS]:
        return 1 + more
    steps = n[FREE_BLOCKS] // batch * size
    spare = n[FREE_BLOCKS] % batch
    while steps < more:
        spare -= n[PHASES_AT + (n[EPOCH] + 1 + steps) % size]
        if spare < 0:
            break
        steps += 1
    return 1 + min(steps, more)


def plan(q: Rows, n: Row, x: Times, c: Kept, k: Rows, log: Row, log_s: Times, now_s: float) -> int:
    """Plan what follows: evict, admit, share the budget. Returns its number of steps.

    0: there is nothing to do. More than 1: they decode, and nothing joins or leaves before the
    last one has ended, unless the caller cuts STEPS.
    """
    evicted = False
    n[STEP_DECODES] = 0
    n[STEP_PROMPTS] = 0
    n[STEP_TOKENS] = 0
    if n[CHUNKED]:
        if n[NUM_DECODING] > 0:
            evicted = grow(q, n, c, k, log, log_s, now_s)
        n[STEP_DECODES] = n[NUM_DECODING]
        plan_chunks(q, n, c, k, n[MAX_BATCHED] - n[NUM_DECODING], not evicted)
    else:
        plan_prompts(q, n, c, k)
        if n[STEP_PROMPTS] == 0 and n[NUM_DECODING] > 0:
            evicted = grow(q, n, c, k, log, log_s, now_s)
            n[STEP_DECODES] = n[NUM_DECODING]
    n[STEP_CACHED] = n[CACHED] if n[STEP_DECODES] > 0 else 0
    if n[STEP_DECODES] == 0 and n[STEP_PROMPTS] == 0:
        return 0
    x[START_S] = now_s
    pairs = attended_pairs(q, n) if x[P9] > 0 and n[STEP_PROMPTS] > 0 else 0.0
    x[FIRST_S] = x[SLOWDOWN] * step_time_s(
        x, n[STEP_PROMPTS], n[STEP_TOKENS], pairs, n[STEP_DECODES], n[STEP_CACHED]
    )
    x[GROWTH_S] = x[SLOWDOWN] * (x[P5] * n[STEP_DECODES] + x[P7])
    # An eviction does not shorten the run: less than its blocks are free, so it stays out until
    # another one finishes, and those behind it with it. With a prefix cache it may find equal
    # blocks that others use, and come back in the next step.
    alone = n[NUM_PREFILLING] > 0 or (evicted and n[CACHING]) or comes_too_late(q, n)
    n[STEPS] = 1 if alone else run_length(q, n)
    return n[STEPS]


def attended_pairs(q: Rows, n: Row) -> float:
    """Σ u·(C + u/2) over the planned chunks: u tokens behind C that have their KV already."""
    pairs = 0.0
    head = n[HEAD_PREFILLING]
    slot = q[head][NEXT]
    while slot != head:
        s = q[slot]
        chunk = s[CHUNK]
        pairs += chunk * (s[COMPUTED] + chunk / 2)
        slot = s[NEXT]
    return pairs


def step_time_s(
    x: Times, prompts: int, tokens: int, pairs: float, decodes: int, cached: int
) -> float:
    """The length of a step of m prompts (n tokens in it) and b decodes (S cached tokens).

    ``pairs``: what the prompts' tokens attend to; p9 is the time of one.
    """
    time_s = 0.0
    if prompts > 0:
        time_s += x[P1] * tokens + x[P2] * prompts + x[P3] * tokens / prompts + x[P4]
        time_s += x[P9] * pairs
    if decodes > 0:
        time_s += x[P5] * cached + x[P6] * decodes + x[P7] * cached / decodes + x[P8]
        if prompts > 0:
            time_s -= min(x[P4], x[P8])
        if decodes + tokens < x[AWAKE_AT]:
            time_s -= x[IDLE_EXPERT_S] * (x[AWAKE_AT] - (decodes + tokens))
    return time_s


def run_end_s(x: Times, steps: int) -> float:
    """When the first ``steps`` steps of the run that is under way have ended."""
    return x[START_S] + (steps * x[FIRST_S] + x[GROWTH_S] * (steps * (steps - 1) / 2))


def steps_ended_by(x: Times, steps: int, now_s: float) -> int:
    """How many of the first ``steps`` steps of the run have ended at ``now_s``."""
    # The root of steps²·GROWTH/2 + steps·(FIRST − GROWTH/2) = now − START, then the rounding.
    passed_s = max(0.0, now_s - x[START_S])
    half_s = x[GROWTH_S] / 2
    linear_s = x[FIRST_S] - half_s
    root_s = math.sqrt(linear_s * linear_s + 4 * half_s * passed_s)
    # This form of the root is exact where GROWTH is 0, and cancels nothing where it is small.
    ended = min(steps, int(2 * passed_s / (linear_s + root_s)))
    while ended < steps and run_end_s(x, ended + 1) <= now_s:
        ended += 1
    while ended > 0 and run_end_s(x, ended) > now_s:
        ended -= 1
    return ended


def cut_run(n: Row, x: Times, now_s: float) -> None:
    """End the run with the step under way; one that ends at ``now_s`` is no longer under way."""
    if n[STEPS] > 1:
        ended = steps_ended_by(x, n[STEPS], now_s)
        if ended == 0 or run_end_s(x, ended) < now_s:
            ended += 1
        n[STEPS] = min(n[STEPS], ended)
        x[NEXT_S] = run_end_s(x, n[STEPS])


# -- ending


def end(q: Rows, n: Row, x: Times, c: Kept, k: Rows, log: Row, log_s: Times, now_s: float) -> None:
    """Apply the steps that ``plan`` planned: their tokens, blocks and finishes."""
    steps = n[STEPS]
    n[STEPS] = 0
    n[ENDED] += steps
    if n[STEP_DECODES] > 0:
        batch = n[NUM_DECODING]
        size = n[BLOCK_TOKENS]
        needed = (steps - 1) // size * batch
        for step in range(1, 1 + (steps - 1) % size):
            needed += n[PHASES_AT + (n[EPOCH] + step) % size]
        use(n, c, needed)
        n[EPOCH] += steps
        n[CACHED] += steps * batch
        n[GENERATION_TOTAL] += steps * batch
        x[DECODE_S] += steps * x[FIRST_S] + x[GROWTH_S] * (steps * (steps - 1) / 2)
        heap = PHASES_AT + size
        while n[NUM_DECODING] > 0 and q[n[heap]][LAST_EPOCH] <= n[EPOCH]:
            slot = n[heap]
            leave_decoding(q, n, c, k, slot)
            q[slot][STATE] = DONE
            record(log, log_s, now_s, slot, FINISHED)
    if n[STEP_PROMPTS] > 0:
        end_chunks(q, n, c, k, log, log_s, now_s)


def end_chunks(q: Rows, n: Row, c: Kept, k: Rows, log: Row, log_s: Times, now_s: float) -> None:
    head = n[HEAD_PREFILLING]
    slot = q[head][NEXT]
    while slot != head:
        s = q[slot]
        following = s[NEXT]
        s[COMPUTED] += s[CHUNK]
        s[CHUNK] = 0
        if s[COMPUTED] == prefill_tokens(q, slot):
            end_prefill(q, n, c, k, log, log_s, now_s, slot)
        slot = following


def end_prefill(
    q: Rows, n: Row, c: Kept, k: Rows, log: Row, log_s: Times, now_s: float, slot: int
) -> None:
    """A prefill is over and emits a token: the first, or after an eviction the next."""
    unlink(q, slot)
    s = q[slot]
    n[NUM_PREFILLING] -= 1
    if s[GENERATED] == 0:
        n[PROMPT_TOTAL] += s[PROMPT]
        record(log, log_s, now_s, slot, FIRST)
    else:
        record(log, log_s, now_s, slot, RESUMED)
    n[GENERATION_TOTAL] += 1
    tokens = prefill_tokens(q, slot)
    s[GENERATED] += 1
    if s[GENERATED] < s[OUTPUT]:
        join_decoding(q, n, slot)
        return
    if s[PINS] == 0:
        free(q, n, c, k, slot, tokens)
    s[STATE] = DONE
    record(log, log_s, now_s, slot, FINISHED)


# -- many instances in virtual time


def comes_before(n: Rows, x: TimeRows, one: int, other: int) -> bool:
    """Whether one instance's next event is before another's; equal ones in the order of index."""
    if x[one][NEXT_S] != x[other][NEXT_S]:
        return x[one][NEXT_S] < x[other][NEXT_S]
    if n[one][PHASE] != n[other][PHASE]:
        return n[one][PHASE] < n[other][PHASE]
    return one < other


def rank(n: Rows, x: TimeRows, first: Row, i: int) -> None:
    """Play instance i's matches again in the tournament whose winner, first[1], comes first.

    ``first`` is a complete binary tree: node k has the children 2k and 2k + 1, the leaves are the
    instances.
    """
    k = (len(first) // 2 + i) // 2
    while k >= 1:
        left = first[2 * k]
        right = first[2 * k + 1]
        first[k] = left if comes_before(n, x, left, right) else right
        k //= 2


def submit(
    q: Rows, n: Rows, x: TimeRows, first: Row, i: int, slot: int, prompt: int, output: int,
    keys: int, now_s: float,
) -> None:  # fmt: skip
    """Give instance i a new sequence; the step that begins at ``now_s`` or next sees it."""
    s = q[slot]
    instance = n[i]
    s[PROMPT] = prompt
    s[OUTPUT] = output
    s[GENERATED] = 0
    s[CHUNK] = 0
    s[PREEMPTIONS] = 0
    s[KEYS] = keys
    s[HITS] = 0
    s[CACHED_TOKENS] = 0
    enqueue(q, instance, slot)
    if instance[AHEAD] and instance[STEPS] > 1:
        ended = steps_ended_by(x[i], instance[STEPS], now_s)
        between = ended > 0 and run_end_s(x[i], ended) == now_s
        s[CAME_IN] = -1 if between else instance[ENDED] + ended + 1
    # Behind others it changes nothing: their missing blocks come free at the end of the run at
    # best.
    if instance[STEPS] == 0 or instance[NUM_WAITING] == 1:
        look_again(n, x, first, i, now_s)


def look_again(n: Rows, x: TimeRows, first: Row, i: int, now_s: float) -> None:
    """Have instance i plan a step that begins at ``now_s``, or when the current one ends."""
    instance = n[i]
    if instance[STEPS] > 0:
        cut_run(instance, x[i], now_s)
    elif x[i][NEXT_S] > now_s:
        x[i][NEXT_S] = now_s
        instance[PHASE] = BEGIN
    rank(n, x, first, i)


def unpin(
    q: Rows, n: Rows, x: TimeRows, c: Kept, k: Rows, first: Row, i: int, slot: int, now_s: float
) -> None:
    """Instance i's blocks of a computed prompt were fetched: they are free."""
    free(q, n[i], c, k, slot, q[slot][PROMPT])
    if n[i][NUM_WAITING] > 0:
        look_again(n, x, first, i, now_s)


def change_slowdown(
    n: Rows, x: TimeRows, first: Row, i: int, slowdown: float, now_s: float
) -> None:
    """The steps of instance i that begin at ``now_s`` or later take ``slowdown`` times as long."""
    cut_run(n[i], x[i], now_s)
    x[i][SLOWDOWN] = slowdown
    rank(n, x, first, i)


def advance(
    q: Rows, n: Rows, x: TimeRows, c: Kept, k: Rows, first: Row, log: Row, log_s: Times,
    until_s: float, stop: bool,
) -> bool:  # fmt: skip
    """Let every instance work until ``until_s``; the events are in the log, in time order.

    Steps that begin at ``until_s`` itself have not begun when this returns. It returns False if
    it returns early: after the first logged events (with ``stop``, and all those of the same
    time), or if the log could overflow.
    """
    log[0] = 0
    while True:
        i = first[1]
        now_s = x[i][NEXT_S]
        if now_s > until_s or (now_s == until_s and n[i][PHASE] == BEGIN):
            return True
        if log[0] > 0 and stop and (n[i][PHASE] == BEGIN or now_s > log_s[log[0]]):
            return False
        # A step logs at most two entries for each sequence that runs.
        if log[0] + 2 * n[i][MAX_SEQS] + 1 >= len(log):
            return False
        if n[i][PHASE] == END:
            end(q, n[i], x[i], c, k, log, log_s, now_s)
            n[i][PHASE] = BEGIN
        elif plan(q, n[i], x[i], c, k, log, log_s, now_s) > 0:
            n[i][PHASE] = END
            x[i][NEXT_S] = run_end_s(x[i], n[i][STEPS])
        else:
            x[i][NEXT_S] = math.inf
        rank(n, x, first, i)


def decoded(n: Rows, x: TimeRows, now_s: float, steps: Row, seconds: Times) -> None:
    """Fill in, for every instance, the decode steps that ended by ``now_s``, and their time."""
    for i in range(len(steps)):
        steps[i], seconds[i] = decoded_by(n[i], x[i], now_s)


def decoded_by(n: Row, x: Times, now_s: float) -> tuple[int, float]:
    """An instance's decode steps that ended by ``now_s``, and their time."""
    steps, seconds = n[EPOCH], x[DECODE_S]
    if n[STEPS] > 0 and n[STEP_DECODES] > 0:
        ended = steps_ended_by(x, n[STEPS], now_s)
        steps += ended
        seconds += run_end_s(x, ended) - x[START_S]
    return steps, seconds
