"""What ``following`` asks a process of its own (``aside``)."""

from dataclasses import dataclass
from typing import NamedTuple

from hetero_gateway.planner.following import Follower, LoadSample, Proposal
from hetero_gateway.planner.held_rates import HeldRates, RateQuestion, find_held_rates
from hetero_gateway.serve.autoscaling.aside import aside


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked.

    Args:
        rates: of the last answer; None: there was none.
    """

    follower: Follower
    sample: LoadSample
    question: RateQuestion
    rates: HeldRates | None


class FollowingAnswer(NamedTuple):
    """The follower as it is now, the rates that it reckoned with, and its proposal."""

    follower: Follower
    rates: HeldRates
    proposal: Proposal


def work(task: Task) -> FollowingAnswer:
    """The answer; in the process that it is called in."""
    rates = task.rates
    if rates is None or not rates.answers(task.question):
        rates = find_held_rates(task.question)
    follower = task.follower
    return FollowingAnswer(follower, rates, follower.follow(task.sample, rates))


async def work_aside(task: Task) -> FollowingAnswer:
    """The answer of a process of its own. Raises HeteroGatewayError: see ``aside``."""
    return await aside(work, task)
