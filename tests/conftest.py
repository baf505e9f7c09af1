import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Everything runs on asyncio, which the gateway is written for."""
    return "asyncio"
