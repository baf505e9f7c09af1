"""Compiling a loop with all that it calls, and keeping the result.

numba keeps compiled code on disk under the file and the byte code of the function that is asked
for. What that calls may be of other files, and would stay as it was when they change: so its name
has a digest of everything that is compiled into it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from xxhash import xxh3_64_hexdigest

from hetero_gateway.core.costs import cost_model
from hetero_gateway.core.instances import observation, speed, state
from hetero_gateway.core.lengths import predictors
from hetero_gateway.core.policies import estimates, finish_time, slo
from hetero_gateway.core.scheduling import probes
from hetero_gateway.sim import block_cache, kernel
from hetero_gateway.sim.compiled import (
    late_binding,
    lengths,
    loads,
    placing,
    progress,
    tables,
)
from hetero_gateway.sim.fleet import ENTRIES, OPTIONS, compile_kernel, jit

_MODULES = (block_cache, kernel, tables, loads, lengths, placing, progress, late_binding)
# Of the core, what the loops share with it.
_SHARED: tuple[Any, ...] = (
    cost_model.attended_pairs,
    cost_model.workload,
    predictors.residual,
    predictors.add_to,
    estimates.busy,
    estimates.room,
    estimates.estimate,
    estimates.late_from_s,
    estimates.cost,
    estimates.cheapest,
    estimates.request_time_s,
    estimates.holds,
    observation.step_terms,
    observation.seconds,
    speed.observe,
    speed.observed,
    speed.weigh,
    speed.revise,
    speed.lose_weight,
    state.note_prefill,
    state.leave_waiting,
    state.prefill_s,
    state.read_clock,
    state.set_rate,
    state.step_row,
    state.steps_missed,
    state.observe_speed,
    state.revise_speed,
    probes.revise_among,
    probes.is_time,
    probes.is_to_be_tried,
    probes.sent,
    slo.violations,
    slo.surely,
    finish_time.idle_before_drain_s,
)


@functools.cache
def compiled(loop: Callable[..., Any]) -> Any:
    """A loop of this package, compiled by numba."""
    # numba's key has the values of a closure in it. A function around the loop would have one too,
    # and all would be optimised once more.
    digest = CellType(_digest(_register()))
    code = loop.__code__.replace(co_freevars=("digest",))
    return jit(FunctionType(code, loop.__globals__, loop.__name__, None, (digest,)))


@functools.cache
def _register() -> tuple[FunctionType, ...]:
    """Have numba compile what the loops call; returns all of it."""
    from numba.extending import register_jitable

    compile_kernel()  # which registers its own, but what it is entered by
    known = {f for module in (block_cache, kernel) for f in _functions(module)} - {*ENTRIES}
    functions = [f for module in _MODULES for f in _functions(module)]
    functions = list(dict.fromkeys([*functions, *_SHARED]))
    for function in functions:
        if function not in known:
            register_jitable(**OPTIONS)(function)
    return tuple(functions)


def _functions(module: ModuleType) -> list[FunctionType]:
    """Its own and those that it has imported."""
    return [value for value in vars(module).values() if isinstance(value, FunctionType)]


def _digest(functions: Iterable[FunctionType]) -> str:
    """Of their code, and of the constants that they take from their modules."""
    parts: list[str] = []
    for function in functions:
        _add_code(parts, function.__code__)
        constants = function.__globals__
        for name in function.__code__.co_names:
            if isinstance(constants.get(name), int | float | tuple):
                parts.append(f"{name}={constants[name]!r}")
    return xxh3_64_hexdigest("\n".join(parts).encode())


def _add_code(parts: list[str], code: CodeType) -> None:
    parts.append(f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_varnames}")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(parts, constant)
        else:
            parts.append(repr(constant))
