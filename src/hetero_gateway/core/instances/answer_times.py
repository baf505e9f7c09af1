"""How long a first token may have taken that nobody saw, by what of the prompts was cached."""

from __future__ import annotations

from hetero_gateway.core.costs.cost_model import attended_pairs
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.prefix_hits import PrefixHits


def first_token_times_s(
    entry: Dispatch,
    ttft_s: float,
    hits: float | None,
    prefix: PrefixHits,
    constants: Constants,
    speed: float,
) -> list[float]:
    """The time to a first token, s, as predicted, had it been known what was prefilled of its
    prompt and of those in front of it; where that is not known, the most and the least.

    Args:
        ttft_s: as predicted when it was sent, with what was charged.
        hits: cached tokens of its prompt, as its answer reported; None: it did not.
        speed: the factor f, observed over modelled time.
    """
    if prefix.off:
        return [ttft_s]
    ratio, c = prefix.ratio, constants
    prompt, charged = entry.prompt_tokens, entry.prefill_tokens
    in_front = 0.0 if entry.before is None else entry.before[2]
    # What of its prompt was prefilled, and which part of what was to be in front of it.
    may_be: tuple[tuple[float, float], ...]
    if ratio is None:
        least = 0.0 if hits is None else prompt - hits
        may_be = ((charged if hits is None else least, 1.0), (least, 0.0))
    else:
        new = min(float(prompt), ratio * charged) if hits is None else prompt - hits
        may_be = ((new, ratio),)
    times_s = []
    for new, of_others in may_be:
        spared_s = c.p1 * (charged - new + (1 - of_others) * in_front)
        if c.p9:
            pairs = attended_pairs(charged, prompt - charged)
            pairs -= attended_pairs(new, prompt - new)
            # In front of it, as if all prompts were of this one's length.
            spared_s += c.p9 * (pairs + (1 - of_others) * in_front * prompt / 2)
        times_s.append(max(0.0, ttft_s - speed * spared_s))
    return times_s
