import signal

import pytest

# A background job of a shell without job control ignores SIGINT, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Everything runs on asyncio, which the gateway is written for."""
    return "asyncio"
