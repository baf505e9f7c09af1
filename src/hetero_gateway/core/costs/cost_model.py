"""The paper's equations: KV memory, step times, and what one request costs one instance.

Source: "High-Throughput LLM inference on Heterogeneous Clusters", sections 3.1 and 4.1.

    paper        name here               unit
    I_r          prompt_tokens           tokens (of one sequence)
    O_r          output_tokens           tokens (of one sequence)
    KVTotal_s    kv_capacity_tokens      tokens
    b_r^s        ideal batch             sequences
    T_r^s        request_time_s          s
    kvusage(s)   kv_usage                ratio, may exceed 1
    w_r^s        workload                s

Differs from the print (docs/design/scheduling.md lists every difference with its reason):
everything is in tokens instead of bytes, so that Eqs. (2), (5) and (8), which disagree in the
print, agree; b is capped at the engine's ``max_num_seqs``; the exponent of Eq. (7) is capped.

Goes beyond the paper: Eq. (3) is linear in a prompt's length, and attention is not. A ninth
constant, p9, is the time of one *attended pair*: a token whose KV is computed, and one that it
attends to. Where it is 0, which is where nobody fitted it, every time is the paper's.

    u  new_tokens      computed by this prefill, of each prompt       tokens
    C  context_tokens  in front of them, in the KV cache already      tokens

    prefill(b, u, C) = p1·b·u + p2·b + p3·u + p4  +  p9·b·u·(C + u/2)

With C = 0 that is a whole prompt. A prompt in chunks attends to as many pairs as in one piece, and
what a prefix cache spares of it is C·C/2. The share p9/p1, often written a, says the same as
p1·b·u·(1 + a·(C + u/2)); p9 is linear, so that it is fitted like the others, and means something
where p1 is 0.

``policies/estimates.py`` has Eqs. (5) and (6) once more, as they are computed for each request.
Nothing here reads a clock or knows about requests in flight.
"""

from __future__ import annotations

import math
from typing import Final

from hetero_gateway.core.costs.profile import Constants, Profile

# e^50 is 5e21: far beyond any backlog that means something, and far below float overflow (e^709).
MAX_EXPONENT: Final = 50.0


def kv_bytes_per_token(
    layers: int, kv_heads: int, head_dim: int, bytes_per_element: float
) -> float:
    """KV-cache bytes of one token; the ``2·l·h·b`` of Eq. (2), with grouped-query attention right.

    The paper's hidden size h counts every attention head; the cache holds only the KV heads.
    """
    return 2 * layers * kv_heads * head_dim * bytes_per_element


def kv_capacity_bytes(
    tensor_parallel: int,
    memory_bytes: float,
    utilisation: float,
    reserved_bytes: float,
    parameters: float,
    bytes_per_parameter: float,
) -> float:
    """Eq. (1): the memory that an instance has left for KV; negative when the model does not fit.

    ``memory_bytes`` (d) and ``reserved_bytes`` (δ) are per accelerator: the paper's formula
    subtracts δ once, its text says "per GPU", and vLLM reserves it on each.
    """
    return (
        tensor_parallel * memory_bytes * utilisation
        - tensor_parallel * reserved_bytes
        - parameters * bytes_per_parameter
    )


def fits_memory(kv_capacity_tokens: float, max_prompt_tokens: int, max_output_tokens: int) -> bool:
    """Eq. (2): whether there is memory for at least the longest request, in tokens."""
    return kv_capacity_tokens >= max_prompt_tokens + max_output_tokens


def attended_pairs(new_tokens: float, context_tokens: float = 0.0) -> float:
    """Pairs of a new token and a token it attends to: the context, and half of the new ones."""
    return new_tokens * (context_tokens + new_tokens / 2)


def prefill_time_s(
    c: Constants, batch: float, new_tokens: float, context_tokens: float = 0.0
) -> float:
    """Eq. (3), and attention: of ``batch`` prompts, ``new_tokens`` of each behind a context.

    Without a context they are the whole prompts.
    """
    eq_3_s = c.p1 * batch * new_tokens + c.p2 * batch + c.p3 * new_tokens + c.p4
    return eq_3_s + c.p9 * batch * attended_pairs(new_tokens, context_tokens)


def decode_step_time_s(c: Constants, batch: float, cached_tokens: float) -> float:
    """τ_decode of Eq. (4): one step of ``batch`` sequences with ``cached_tokens`` cached each."""
    return c.p5 * batch * cached_tokens + c.p6 * batch + c.p7 * cached_tokens + c.p8


def decode_time_s(c: Constants, batch: float, prompt_tokens: float, output_tokens: float) -> float:
    """Eq. (4): the sum over k = 1..O of τ_decode(I + k, b), in closed form."""
    return (
        output_tokens * decode_step_time_s(c, batch, prompt_tokens)
        + (c.p5 * batch + c.p7) * output_tokens * (output_tokens + 1) / 2
    )


def ideal_batch(profile: Profile, prompt_tokens: float, output_tokens: float) -> float:
    """Eq. (5): how many requests like this one fill the KV cache, at most ``max_num_seqs``.

    Below 1 the request does not fit this instance at all.
    """
    return min(
        profile.kv_capacity_tokens / (prompt_tokens + output_tokens), float(profile.max_num_seqs)
    )


def request_time_s(profile: Profile, prompt_tokens: float, output_tokens: float) -> float:
    """Eq. (6): T_r^s, its share of the ideal batch's time; infinite if it does not fit.

    Includes attention if p9 is not 0, as in ``prefill_time_s``.
    """
    b = ideal_batch(profile, prompt_tokens, output_tokens)
    if b < 1:
        return math.inf
    c = profile.constants
    batch_time_s = prefill_time_s(c, b, prompt_tokens) + decode_time_s(
        c, b, prompt_tokens, output_tokens
    )
    return batch_time_s / b


def kv_usage(outstanding_tokens: float, kv_capacity_tokens: float) -> float:
    """Eq. (8): prompt and predicted output tokens of unfinished requests, over capacity."""
    return outstanding_tokens / kv_capacity_tokens


def workload(request_time_s: float, kv_usage: float, theta: float) -> float:
    """Eq. (7): w_r^s = T_r^s · e^(θ·kvusage), with the usage before the request is added."""
    return request_time_s * math.exp(min(theta * kv_usage, MAX_EXPONENT))
