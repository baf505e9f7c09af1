"""How long a first token may have taken that nobody saw, by what of the prompts was cached."""

from __future__ import annotations

from hetero_gateway.core.costs.cost_model import attended_pairs
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.prefix_hits import PrefixHits, reported_hits
from hetero_gateway.core.types import Usage


def first_token_times_s(
    entry: Dispatch,
    ttft_s: float,
    usage: Usage | None,
    prefix: PrefixHits,
    constants: Constants,
    speed: float,
) -> tuple[float, ...]:
    """The time to a first token, s, as predicted, had it been known what was prefilled of its
    prompt and of those in front of it; where that is not known, the most and the least.

    Args:
        ttft_s: as predicted when it was sent, with what was charged.
        usage: of its answer.
        speed: the factor f, observed over modelled time.
    """
    if prefix.caching is False:
        return (ttft_s,)
    ratio, hits = prefix.ratio, reported_hits(entry, usage)
    prompt, charged = entry.prompt_tokens, entry.prefill_tokens
    if ratio is None:
        least = 0.0 if hits is None else prompt - hits
        most = charged if hits is None else least
        return tuple(
            max(0.0, ttft_s - speed * _spared_s(entry, new, of_others, constants))
            for new, of_others in ((most, 1.0), (least, 0.0))
        )
    new = min(float(prompt), ratio * charged) if hits is None else prompt - hits
    return (max(0.0, ttft_s - speed * _spared_s(entry, new, ratio, constants)),)


def _spared_s(entry: Dispatch, new_tokens: float, ratio: float, c: Constants) -> float:
    """The time, s, by which a first token comes sooner than was charged, where so much of its
    prompt was prefilled, and this part of what was to be in front of it.

    Attention in front of it is taken as if all prompts were of this one's length.
    """
    prompt, charged = entry.prompt_tokens, entry.prefill_tokens
    in_front = 0.0 if entry.before is None else entry.before[2]
    tokens = charged - new_tokens + (1 - ratio) * in_front
    if not c.p9:
        return c.p1 * tokens
    pairs = attended_pairs(charged, prompt - charged)
    pairs -= attended_pairs(new_tokens, prompt - new_tokens)
    return c.p1 * tokens + c.p9 * (pairs + (1 - ratio) * in_front * prompt / 2)
