"""Simulations beside the gateway: a process of its own for each answer, which ends with it.

They take seconds of CPU: in the gateway's process, also in a thread, streams would feel them. The
child is given its question on standard input and writes the answer to standard output, both pickled
(nobody else writes to either). It is nice, may use ``_CPU_S`` of CPU and ``_WALL_S`` of time, and
what it does wrong is an error here and nothing more.
"""

import asyncio
import os
import pickle
import resource
import signal
import sys
from dataclasses import dataclass
from typing import NamedTuple

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.planner.following import Follower, LoadSample, Proposal
from hetero_gateway.planner.held_rates import HeldRates, RateQuestion, find_held_rates

_CPU_S = 60
_WALL_S = 180.0
_NICE = 10
_MOST_ERROR_BYTES = 2000
# Not ``-m``: what is then the main module would be pickled as no other process knows it.
_PROGRAM = f"import sys; from {__name__} import main; sys.exit(main())"


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
    """The answer of a process of its own.

    Raises:
        HeteroGatewayError: it failed, or took too long.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _PROGRAM,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_WALL_S):
            output, errors = await process.communicate(pickle.dumps(task))
    except TimeoutError:
        raise HeteroGatewayError(f"the simulation took more than {_WALL_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors[-_MOST_ERROR_BYTES:].decode(errors="replace").strip().splitlines()
        why = last[-1] if last else "no reason"
        raise HeteroGatewayError(f"the simulation ended with {process.returncode}: {why}")
    answer: FollowingAnswer = pickle.loads(output)
    return answer


def main() -> int:
    """Read a task, write its answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the gateway ends it
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    task = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(work(task)))
    return 0
