"""The speed factor of one instance: observed over modelled time, and how long it is believed.

    factor    Σ observed / Σ modelled, both exponentially forgotten over seconds of observed time

While an instance has traffic, that is all. But a high factor keeps traffic away, and without
traffic nothing is observed: it would stay for ever. So a factor that was not observed for a while
is *doubted* if it is well above the best known one of comparable instances:

- it moves towards that best by itself as time passes, and its observations lose their weight, so
  that the first new one counts;
- the scheduler sends the instance a request now and then (``scheduling/probes.py``), which observes
  it long before its factor looks good again.

Other gateways' observations count as well, as a factor within ``MOST_APART`` of this gateway's
own, or within ``MOST_UNSEEN_APART`` while this one has observed nothing: a peer that lies keeps no
instance idle, and makes none look much faster than it is.

An instance that really is that slow costs one request now and then; see docs/design/corrections.md.
Nothing here reads a clock.
"""

from __future__ import annotations

import math
from typing import Final

from hetero_gateway.core.costs.cost_model import attended_pairs
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.prefix_hits import PrefixHits

# Long enough to average the noise of a network, short enough to notice a slow-down within a few
# answers. The prior is 0.2 s as modelled; for a stand-in, whose constants only give proportions,
# hardly anything: of equal machines, those used first would look fast, or slow.
FORGET_S: Final = 5.0
PRIOR_S, STAND_IN_PRIOR_S = 0.2, 0.02
# Much faster than thought, after this much observed time: whatever held it up is over, and older
# observations say little.
MENDED, MATURE_S, FORGET_MENDED_S = 1.5, 3.0, 1.0
# Doubted: not observed for this long, and this many times above the best; until it is that close.
# Between machines that only their factors tell apart, noise is enough to keep traffic away.
UNSEEN_S: Final = 2.0
DOUBTED, STAND_IN_DOUBTED, CLEARED = 1.25, 1.05, 1.02
# How fast a doubted factor moves to the best, in wall time, and loses its weight. The former is
# slow compared with the pace of probes: where there is traffic, they find out.
DECAY_S: Final = 5.0
WEIGHT_S: Final = 1.0
LEAST_WEIGHT_S: Final = 0.02
# The guess for an instance that was never used decays to 1 with this time constant: a minute or two
# until it is tried, if the others are that wrong only by themselves.
GUESS_FADES_S: Final = 60.0
# How many times above or below our own factor the others' may be.
MOST_APART, MOST_UNSEEN_APART = 2.0, 4.0


class SpeedEstimate:
    """The data behind one instance's factor; the functions below change it.

    They ask for these fields alone: the simulator's compiled loop has them in a table.

    Attributes:
        factor, own: the last factor, and the one without what others report.
        lowest, highest: its bounds.
        prior_s: what both sums were before anything was observed.
        doubted_from: this many times above the best it is doubted.
        doubted: it is too high for not having been observed for so long.
        seen_s, revised_s: when it was last observed, or first assumed to match its profile; and
            when it was last revised while doubted, or first guessed.
        observed_s, modelled_s: the sums, with forgetting.
    """

    __slots__ = (
        "doubted",
        "doubted_from",
        "factor",
        "highest",
        "lowest",
        "modelled_s",
        "observed_s",
        "own",
        "prior_s",
        "revised_s",
        "seen_s",
    )

    def __init__(self, lowest: float, highest: float) -> None:
        self.lowest, self.highest = lowest, highest
        self.factor = self.own = 1.0
        self.doubted = False
        self.seen_s = self.revised_s = 0.0
        self.prior_s = self.observed_s = self.modelled_s = PRIOR_S
        self.doubted_from = DOUBTED

    def set_kind(self, lowest: float, highest: float, *, stands_in: bool) -> None:
        """Set its bounds; ``stands_in``: the constants only give proportions."""
        self.lowest, self.highest = lowest, highest
        self.doubted_from = STAND_IN_DOUBTED if stands_in else DOUBTED
        if not observed(self):
            self.prior_s = STAND_IN_PRIOR_S if stands_in else PRIOR_S
            self.observed_s = self.modelled_s = self.prior_s

    def sums(self) -> tuple[float, float]:
        """Recent observed and modelled time, s; zeros before anything was observed."""
        return (self.observed_s, self.modelled_s) if observed(self) else (0.0, 0.0)


def observed(e: SpeedEstimate) -> bool:
    """Whether anything was observed beyond the prior."""
    return not e.observed_s == e.modelled_s == e.prior_s


def observe(
    e: SpeedEstimate,
    observed_s: float,
    modelled_s: float,
    now_s: float,
    others_observed_s: float,
    others_modelled_s: float,
) -> float:
    """Add an observed time and its modelled time; returns the factor, as ``weigh``."""
    if e.observed_s == e.modelled_s == e.prior_s:  # ``observed``, inlined for every answer
        # It begins at its assumed speed, and the smaller sums carry less weight.
        e.observed_s = e.prior_s * min(1.0, e.own)
        e.modelled_s = e.prior_s * min(1.0, 1.0 / e.own)
    forget_s = FORGET_S
    if (
        observed_s * MENDED < e.factor * modelled_s
        and e.factor > MENDED
        and (e.doubted or e.observed_s > MATURE_S)
    ):
        forget_s = FORGET_MENDED_S
    keep = math.exp(-observed_s / forget_s)
    e.observed_s = e.observed_s * keep + observed_s
    e.modelled_s = e.modelled_s * keep + modelled_s
    e.seen_s = now_s
    return weigh(e, others_observed_s, others_modelled_s)


def weigh(e: SpeedEstimate, others_observed_s: float, others_modelled_s: float) -> float:
    """The factor of all observations, including other gateways'."""
    own = e.observed_s / e.modelled_s
    if own < e.lowest:
        own = e.lowest
    if own > e.highest:
        own = e.highest
    e.factor = e.own = own
    if others_modelled_s > 0:
        apart = MOST_APART if observed(e) else MOST_UNSEEN_APART
        theirs = min(own * apart, max(own / apart, others_observed_s / others_modelled_s))
        observed_s = e.observed_s + theirs * others_modelled_s
        factor = observed_s / (e.modelled_s + others_modelled_s)
        e.factor = min(e.highest, max(e.lowest, factor))
    return e.factor


def guess(e: SpeedEstimate, others: float, now_s: float) -> None:
    """Set the factor of an instance that was never observed to the best observed of ``others``.

    Profiles of one origin are wrong together, at the start. But this one's may be right, so the
    guess fades and the instance is tried. Once another instance turned out to match its profile,
    this one is assumed to match until it is used: what slows that other one down later, a fault, is
    its own. If peers have observed it, their factor counts.
    """
    if e.seen_s > 0 or e.factor != e.own:
        return
    if 1 / DOUBTED <= others <= DOUBTED:
        e.seen_s = now_s
        others = 1.0
    if e.revised_s == 0:
        e.revised_s = now_s
    others = others ** math.exp((e.revised_s - now_s) / GUESS_FADES_S)
    e.factor = e.own = min(e.highest, max(e.lowest, others))


def revise(e: SpeedEstimate, best: float, now_s: float) -> None:
    """Let time pass. ``best``: the best factor of comparable instances."""
    if e.doubted:
        if e.factor <= CLEARED * best:
            e.doubted = False
            if now_s - e.seen_s >= UNSEEN_S:
                # This close counts as equal: nothing should keep traffic away.
                e.factor = e.own = best
    elif e.factor > e.doubted_from * best and now_s - e.seen_s >= UNSEEN_S:
        e.doubted = True
        e.revised_s = now_s
        lose_weight(e, now_s - e.seen_s)
    if not e.doubted:
        return
    elapsed_s = now_s - max(e.revised_s, e.seen_s + UNSEEN_S)
    e.revised_s = now_s
    if elapsed_s > 0:
        keep = math.exp(-elapsed_s / DECAY_S)
        e.factor = best * (e.factor / best) ** keep
        e.own = best * (e.own / best) ** keep
        lose_weight(e, elapsed_s)


def lose_weight(e: SpeedEstimate, elapsed_s: float) -> None:
    """Let past observations count less."""
    keep = math.exp(-elapsed_s / WEIGHT_S)
    e.modelled_s = max(LEAST_WEIGHT_S, e.modelled_s * keep)
    # Without what others report: their factor would become ours, again and again.
    e.observed_s = e.modelled_s * e.own


# An answer whose tokens were not seen also says something about the speed, by its duration: with
# the possible times of its first token.


def first_token_times_s(
    entry: Dispatch,
    ttft_s: float,
    hits: float | None,
    prefix: PrefixHits,
    constants: Constants,
    speed: float,
) -> list[float]:
    """The time to a first token, s, as it would have been predicted with the true prefilled tokens
    of its prompt and of those before it; if they are unknown, the most and the least.

    Args:
        ttft_s: as predicted when it was sent, with what was charged.
        hits: cached tokens of its prompt, as its answer reported; None: not reported.
        speed: the factor f, observed over modelled time.
    """
    if prefix.off:
        return [ttft_s]
    ratio, c = prefix.ratio, constants
    prompt, charged = entry.prompt_tokens, entry.prefill_tokens
    in_front = 0.0 if entry.before is None else entry.before[2]
    # The prefilled part of its prompt, and the share of the prefill that was to come before it.
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
            # Before it, as if all prompts had this one's length.
            spared_s += c.p9 * (pairs + (1 - of_others) * in_front * prompt / 2)
        time_s = ttft_s - speed * spared_s
        times_s.append(time_s if time_s > 0.0 else 0.0)
    return times_s
