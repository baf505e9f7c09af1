"""/admin of the gateways that tests start, with the key that each makes, as commands ask for it.

Commands find a gateway's own key in a file (``files/admin_key.py``). A test's gateways have such
files, too, and its HTTP clients send what stands there: to /admin, at exactly the address of such a
gateway, and where the test itself says nothing of a key. Through a proxy, or over a plain socket, a
test is a stranger.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from hetero_gateway.files.admin_key import find, forget, keep


def send_keys(patch: pytest.MonkeyPatch) -> None:
    """Have all of httpx's clients send them."""
    for kind in (httpx.Client, httpx.AsyncClient):
        patch.setattr(kind, "build_request", _with_key(kind.build_request))


def _with_key(build: Callable[..., httpx.Request]) -> Callable[..., httpx.Request]:
    def build_request(*args: Any, **options: Any) -> httpx.Request:
        request = build(*args, **options)
        if request.url.path.startswith("/admin") and "authorization" not in request.headers:
            if (found := find(str(request.url))) is not None:
                request.headers["authorization"] = f"Bearer {found.key}"
        return request

    return build_request


@contextlib.contextmanager
def kept(key: str | None, *urls: str) -> Iterator[None]:
    """The key of a gateway at these URLs is found there until the block ends."""
    if key is None:
        yield
        return
    try:
        for url in urls:
            keep(key, url)
        yield
    finally:
        forget(key)
