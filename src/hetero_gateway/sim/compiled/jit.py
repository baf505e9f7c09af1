"""Compiling a loop with all that it calls, and keeping the result.

numba keeps compiled code on disk under the file and the byte code of the function that is asked
for. What that calls may be of other files, and would stay as it was when they change: so its name
has a digest of everything that is compiled into it.
"""

import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from xxhash import xxh3_64_hexdigest

from hetero_gateway.sim import block_cache, kernel
from hetero_gateway.sim.fleet import ENTRIES, OPTIONS, compile_kernel, jit


@functools.cache
def compiled(loop: FunctionType) -> Any:
    """A loop of this package, compiled by numba."""
    functions = _called(loop)
    compile_kernel()
    registered = {block_cache.__name__, kernel.__name__}
    for function in functions:
        if function.__module__ not in registered or function in ENTRIES:
            _register(function)
    name = f"{loop.__name__}_{_digest(functions)}"
    code = loop.__code__.replace(co_name=name, co_qualname=name)
    return jit(FunctionType(code, loop.__globals__, name))


@functools.cache
def with_function(caller: FunctionType, old: Any, new: Any) -> Any:
    """A loop with one function in the place of another: a copy, where it or what it calls by name
    calls that.
    """
    replaced = {old: new}
    for called in _functions(caller):
        if called not in replaced:
            copy = with_function(called, old, new)
            if copy is not called:
                replaced[called] = copy
    names = caller.__globals__
    others = {
        name: replaced[names[name]]
        for name in caller.__code__.co_names
        if isinstance(names.get(name), FunctionType) and names[name] in replaced
    }
    if not others:
        return caller
    return FunctionType(caller.__code__, {**names, **others}, caller.__name__)


@functools.cache
def _register(function: FunctionType) -> None:
    """Have numba compile it where a loop calls it."""
    from numba.extending import register_jitable

    register_jitable(**OPTIONS)(function)


def _called(loop: FunctionType) -> set[FunctionType]:
    """A loop, and all that it calls, or that what it calls does."""
    found, left = {loop}, [loop]
    while left:
        new = {*_functions(left.pop())} - found
        found |= new
        left += new
    return found


def _functions(caller: FunctionType) -> Iterator[FunctionType]:
    """Those whose names are in its code, or behind the name of a module; not those that numba has
    of its own.
    """
    names = caller.__code__.co_names
    values = [caller.__globals__.get(name) for name in names]
    modules = [value for value in values if isinstance(value, ModuleType)]
    values += [getattr(module, name, None) for module in modules for name in names]
    for value in values:
        if isinstance(value, FunctionType) and not value.__module__.startswith("numpy"):
            yield value


def _digest(functions: Iterable[FunctionType]) -> str:
    """Of their code, and of the constants and types that they take from their modules.

    What is kept names the types of a loop's arguments, and cannot be read once one has moved.
    """
    values = [value for function in functions for value in function.__globals__.values()]
    types = {f"{t.__module__}.{t.__qualname__}" for t in values if isinstance(t, type)}
    parts = sorted(types)
    for function in sorted(functions, key=lambda f: (f.__module__, f.__qualname__)):
        _add_code(parts, function.__code__)
        parts += [repr(cell.cell_contents) for cell in function.__closure__ or ()]
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
