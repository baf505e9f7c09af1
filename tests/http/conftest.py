"""Gateway, instances and clients of these tests share one event loop: it runs in virtual time."""

from tests.fakes.clock import anyio_backend

__all__ = ["anyio_backend"]
