"""Simulations beside the gateway: each runs in a process of its own.

They take seconds of CPU: in the gateway's process, even in a thread, they would delay streams. The
child reads a function and its argument from standard input and writes the answer to standard
output, both pickled (nobody else writes to either). It is nice, may use ``_CPU_S`` of CPU and
``_WALL_S`` of time, and its failures are errors here and nothing more.
"""

import asyncio
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

from hetero_gateway.errors import HeteroGatewayError

QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")

_CPU_S = 60
_WALL_S = 180.0
_NICE = 10
_MOST_ERROR_BYTES = 2000
# Not ``-m``: the main module's objects would be pickled under a name other processes do not know.
_PROGRAM = f"import sys; from {__name__} import main; sys.exit(main())"


async def aside(work: Callable[[QuestionT], AnswerT], question: QuestionT) -> AnswerT:
    """Call a module's function in a process of its own, and return its answer.

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
            output, errors = await process.communicate(pickle.dumps((work, question)))
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
    answer: AnswerT = pickle.loads(output)
    return answer


def main() -> int:
    """Read a function and its argument, write its answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the gateway ends it
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    work, question = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(work(question)))
    return 0
