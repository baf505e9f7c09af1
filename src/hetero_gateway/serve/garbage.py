"""What a process makes at its start stays for good: the garbage collector need not walk it again
and again, which would hold every stream for milliseconds. And what a long body took goes back to
the system with it.
"""

import contextlib
import gc

# So many objects more than have gone are looked at for cycles. A request has some forty, and leaves
# none behind: at Python's own 700, a burst of twenty would have that done each time.
_YOUNG_OBJECTS = 10_000
# From this size on, memory is mapped for each object by itself. Left alone, glibc's malloc raises
# that to the size of what was freed last, and keeps such pieces, with gaps between them.
_MAPPED_BYTES = 4 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h


def freeze_what_start_made() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
    _map_long_objects()


def freeze_what_came_later() -> None:
    """Where the start's is frozen. Counting that would take the longer, the more there is."""
    if gc.get_threshold()[0] == _YOUNG_OBJECTS:
        gc.freeze()


def _map_long_objects() -> None:
    import ctypes  # here: who only imports a server has no use for it

    with contextlib.suppress(AttributeError, OSError):  # another system's
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
