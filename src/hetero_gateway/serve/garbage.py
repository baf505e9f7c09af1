"""What a process makes at its start stays for good: the garbage collector need not walk it again
and again, which would hold every stream for milliseconds.
"""

import gc

# So many objects more than have gone are looked at for cycles. A request has some forty, and leaves
# none behind: at Python's own 700, a burst of twenty would have that done each time.
_YOUNG_OBJECTS = 10_000


def freeze_what_start_made() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


def freeze_what_came_later() -> None:
    """Where the start's is frozen. Counting that would take the longer, the more there is."""
    if gc.get_threshold()[0] == _YOUNG_OBJECTS:
        gc.freeze()
