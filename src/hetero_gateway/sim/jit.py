"""Compiling a function and all that it calls by numba (the extra ``fast``), and caching the result.

A cache entry has the name of a function, and a digest of everything that is compiled into it. So it
can be in the user's own cache (or ``NUMBA_CACHE_DIR``), where another checkout or environment with
the same source finds it; numba's own place is next to the source, keyed by that one file's time.
"""

import functools
import importlib.util
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any

from xxhash import xxh3_64_hexdigest

# Without reference counting, which would take half of the time: wherever a tuple of arrays is taken
# apart, each of them is counted. Code compiled like this can neither make an array nor return one
# that it was not given; numba reports such code. Nobody calls it through a wrapper.
_OPTIONS: Any = {"_nrt": False, "no_cfunc_wrapper": True}


def can_compile() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def compiled(function: FunctionType) -> Any:
    """A function of plain numbers and arrays, compiled by numba on its first call."""
    import numba

    functions = _called(function)
    for called in functions - {function}:
        _register(called)
    name = f"{function.__name__}_{_digest(functions)}"
    code = function.__code__.replace(co_name=name, co_qualname=name)
    renamed = FunctionType(code, function.__globals__, name)
    dispatcher = numba.njit(**_OPTIONS)(renamed)
    dispatcher._cache = _kept()(renamed)
    return dispatcher


@functools.cache
def _kept() -> Any:
    """numba's own cache, in another place, and never out of date."""
    caching: Any = import_module("numba.core.caching")
    folders: Any = import_module("numba.misc.appdirs")

    class Locator(caching._CacheLocator):  # type: ignore[misc]
        def get_cache_path(self) -> str:
            users_own = folders.AppDirs("hetero-gateway", appauthor=False).user_cache_dir
            return str(caching.config.CACHE_DIR or users_own)

        def get_source_stamp(self) -> str:
            return ""

        def get_disambiguator(self) -> str:
            return ""

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            locator = cls()
            try:
                locator.ensure_cache_path()
            except OSError:
                return None  # not writable: use numba's own place
            return locator

    class Place(caching.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes = (Locator, *caching.CompileResultCacheImpl._locator_classes)

    class Kept(caching.FunctionCache):  # type: ignore[misc]
        _impl_class = Place

    return Kept


@functools.cache
def with_function(caller: FunctionType, old: Any, new: Any) -> Any:
    """A loop with one function replaced by another: a copy, if it or a function that it calls by
    name calls that.
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

    register_jitable(**_OPTIONS)(function)


def _called(loop: FunctionType) -> set[FunctionType]:
    """A loop, and everything that it calls, directly or indirectly."""
    found, left = {loop}, [loop]
    while left:
        new = {*_functions(left.pop())} - found
        found |= new
        left += new
    return found


def _functions(caller: FunctionType) -> Iterator[FunctionType]:
    """The functions whose names are in its code, or after a module's name; without numba's own."""
    names = caller.__code__.co_names
    values = [caller.__globals__.get(name) for name in names]
    modules = [value for value in values if isinstance(value, ModuleType)]
    values += [getattr(module, name, None) for module in modules for name in names]
    for value in values:
        if isinstance(value, FunctionType) and not value.__module__.startswith("numpy"):
            yield value


def _digest(functions: Iterable[FunctionType]) -> str:
    """Of their code, and of the constants and types that they use from their modules.

    An entry names the types of a loop's arguments, and cannot be read once one has moved.
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
