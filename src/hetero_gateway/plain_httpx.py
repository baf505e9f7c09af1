"""httpx without its command line, which it imports with itself: rich, click and pygments.

They are two thirds of the time that ``import httpx`` takes, and 4 MB of every gateway's memory.
Where httpx was imported by somebody else already, it is that one.
"""

import sys

if "httpx" not in sys.modules:
    # What stands as None cannot be imported; httpx takes it for a package that is not installed.
    sys.modules["httpx._main"] = None  # type: ignore[assignment]
    import httpx

    del sys.modules["httpx._main"]

import httpx

__all__ = ["httpx"]
