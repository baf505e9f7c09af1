"""Gateway, instances and clients of these tests share one event loop: it runs in virtual time."""

from collections.abc import Iterator

import pytest

from tests.fakes.clock import anyio_backend
from tests.fakes.redis import RedisServer, redis_server

__all__ = ["anyio_backend"]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running
