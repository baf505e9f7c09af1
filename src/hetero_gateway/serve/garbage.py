"""Objects made at a process's start stay for good: the garbage collector need not walk them again
and again, which would delay every stream for milliseconds. And a long body's memory goes back to
the system with it.
"""

import contextlib
import gc

# The collector runs after this many more allocations than deallocations. A request makes some forty
# objects, none in cycles: at Python's own 700, a burst of twenty would trigger it each time.
_YOUNG_OBJECTS = 10_000
# From this size on, each object gets its own mapping. By default, glibc's malloc raises this to the
# size of the last freed block, and keeps such blocks, with gaps between them.
_MAPPED_BYTES = 4 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h


def freeze_what_start_made() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
    _map_long_objects()


def freeze_what_came_later() -> None:
    """Only if the start's are frozen; the threshold tells, as counting frozen objects is slow."""
    if gc.get_threshold()[0] == _YOUNG_OBJECTS:
        gc.freeze()


def _map_long_objects() -> None:
    import ctypes  # here: mere importers do not need it

    with contextlib.suppress(AttributeError, OSError):  # on other systems
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
