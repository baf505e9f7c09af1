"""The work that ``following`` does in a process of its own (``aside``)."""

from dataclasses import dataclass
from typing import NamedTuple

from hetero_gateway.planner.following import Follower, LoadSample, Proposal
from hetero_gateway.planner.held_rates import HeldRates, RateQuestion, find_held_rates
from hetero_gateway.serve.autoscaling.aside import aside


@dataclass(frozen=True, slots=True)
class Task:
    """The question.

    Args:
        rates: from the last answer; None: there was none.
    """

    follower: Follower
    sample: LoadSample
    question: RateQuestion
    rates: HeldRates | None


class FollowingAnswer(NamedTuple):
    """The follower's new state, the rates used, and its proposal."""

    follower: Follower
    rates: HeldRates
    proposal: Proposal


def work(task: Task) -> FollowingAnswer:
    """Compute the answer in the calling process."""
    rates = task.rates
    if rates is None or not rates.answers(task.question):
        rates = find_held_rates(task.question)
    follower = task.follower
    return FollowingAnswer(follower, rates, follower.follow(task.sample, rates))


async def work_aside(task: Task) -> FollowingAnswer:
    """Compute the answer in a process of its own. Raises HeteroGatewayError: see ``aside``."""
    return await aside(work, task)
