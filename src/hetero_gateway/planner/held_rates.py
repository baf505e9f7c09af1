"""The rates that instances hold for a mix, by simulation: each type alone, and several together.

alone      requests/s of one saturated instance, less ``HEADROOM``
held       the share of it at which one instance keeps the latency goals
together   requests/s that several hold behind the gateway, over the sum of what each holds:
           above 1 if they share what is too much for one, below 1 if the policy loses
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.planner.goals import HEADROOM, Goals, find_goodput
from hetero_gateway.planner.plan import Key
from hetero_gateway.planner.question import Trials, reduced
from hetero_gateway.sim.alone import Alone, Engines, Mix, run_alone
from hetero_gateway.sim.workload import TraceLengths


def key_of(profile: Profile) -> Key:
    """The type of an instance with this profile."""
    return profile.gpu, profile.tensor_parallel


# Without latency goals: above it queues grow fast, and many feel a burst of a minute.
_BUSY = 0.85
# Step of the tried rates, as a share of the highest.
_STEP = 1 / 16
_LEAST_TOGETHER, _MOST_TOGETHER = 0.5, 1.3
# If the mean lengths differ by more, it is another mix.
_OTHER_LENGTHS = 0.1
# Requests of a run of several instances.
_TOGETHER_REQUESTS = 1600
_ALONE_REQUESTS = 1500


@dataclass(frozen=True, slots=True)
class RateQuestion:
    """The question: profiles by type, recent requests, limits, and how they are served.

    Args:
        requests: (prompt, output) tokens of recent requests, at least one.
        counts: roughly the present instances, for the capacity of several together.
        ranks: by type, how many engines one instance has, if more than one: each has the
            profile.
    """

    profiles: Mapping[Key, Profile]
    requests: Sequence[tuple[int, int]]
    goals: Goals = field(default_factory=Goals)
    counts: Mapping[Key, int] = field(default_factory=dict)
    policy: str = "finish-time"
    engines: Engines = field(default_factory=Engines)
    seed: int = 0
    ranks: Mapping[Key, int] = field(default_factory=dict)

    @property
    def trials(self) -> Trials:
        return Trials(self.policy, self.engines, _TOGETHER_REQUESTS, slo=self.goals.slo)


@dataclass(frozen=True, slots=True)
class HeldRates:
    """Requests per second that one instance of each type holds, as one of several.

    Args:
        per_s: by type; 0: it cannot keep the goals at any rate, or cannot take the requests.
        mean_prompt, mean_output: tokens of the requests that it was found for.
        profiles, goals, ranks: those it was found with.
        keeps_goals: False if no type keeps the latency goals at any rate: then the rates are
            the types' without goals.
    """

    per_s: Mapping[Key, float]
    mean_prompt: float
    mean_output: float
    profiles: Mapping[Key, Profile] = field(repr=False)
    goals: Goals
    keeps_goals: bool = True
    ranks: Mapping[Key, int] = field(default_factory=dict)

    def of(self, counts: Mapping[Key, int]) -> float:
        """Requests/s that such numbers of each hold."""
        return sum(self.per_s.get(key, 0.0) * n for key, n in counts.items())

    def answers(self, question: RateQuestion) -> bool:
        """Whether it still applies: the same engines and goals, and about the same lengths.

        The capacity of several together is not computed again when single instances change.
        """
        found_with = (self.profiles, self.goals, self.ranks)
        if found_with != (question.profiles, question.goals, question.ranks):
            return False
        prompt, output = np.mean(question.requests, axis=0)
        return not any(
            abs(now / then - 1) > _OTHER_LENGTHS
            for now, then in ((prompt, self.mean_prompt), (output, self.mean_output))
        )


def find_held_rates(question: RateQuestion) -> HeldRates:
    """Simulate; some seconds of CPU for two or three types."""
    rows = np.array(question.requests, dtype=np.int64).reshape(-1, 2)
    mix = Mix.of(TraceLengths(rows[:, 0], rows[:, 1]), question.seed)
    alone = {
        key: found
        for key, profile in question.profiles.items()
        if (found := run_alone(profile, mix, question.engines, _ALONE_REQUESTS)) is not None
    }
    most = {
        key: each.tokens_per_s / mix.mean_tokens / (1 + HEADROOM) for key, each in alone.items()
    }
    held = {key: _held_alone(question, mix, key, rate) for key, rate in most.items()}
    keeps_goals = any(held.values())
    if not keeps_goals:
        held = {key: _BUSY * rate for key, rate in most.items()}
    share = _together(question, mix, alone, held) if keeps_goals else 1.0
    ranks = question.ranks
    return HeldRates(
        {key: share * held.get(key, 0.0) * ranks.get(key, 1) for key in question.profiles},
        mix.mean_prompt,
        mix.mean_output,
        question.profiles,
        question.goals,
        keeps_goals,
        ranks,
    )


def _held_alone(question: RateQuestion, mix: Mix, key: Key, most_per_s: float) -> float:
    """Requests/s of one engine within the limits; 0: not at any rate."""
    if not question.goals.has_limits:
        return _BUSY * most_per_s

    hold = functools.partial(question.trials.hold_alone, question.profiles[key], mix)
    likely = _BUSY * most_per_s
    found = find_goodput(hold, question.goals, most_per_s, step=_STEP, likely_per_s=likely)
    return 0.0 if found is None else found.rate_per_s


def _together(
    question: RateQuestion,
    mix: Mix,
    alone: Mapping[Key, Alone],
    held: Mapping[Key, float],
) -> float:
    """The capacity of several over the sum of each alone."""
    able = {
        key: n * question.ranks.get(key, 1)
        for key, n in question.counts.items()
        if n > 0 and held.get(key, 0.0) > 0
    }
    if sum(able.values()) < 2 or not question.goals.has_limits:
        return 1.0
    by_profile = {question.profiles[key]: n for key, n in able.items()}
    system = reduced(
        by_profile, {question.profiles[key]: alone[key] for key in able}, _TOGETHER_REQUESTS
    )
    total = sum(held[key] * n for key, n in able.items())

    hold = functools.partial(question.trials.hold, system, mix)
    most = _MOST_TOGETHER * total
    found = find_goodput(hold, question.goals, most, step=_STEP, likely_per_s=total)
    return _LEAST_TOGETHER if found is None else max(_LEAST_TOGETHER, found.rate_per_s / total)
