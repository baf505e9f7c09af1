import signal
from collections.abc import Iterator
from pathlib import Path

import certifi
import hypothesis
import pytest

# A busy machine must not fail a law, and a failure must come back when the test is run again.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")

# A background job of a shell without job control ignores SIGINT, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Everything runs on asyncio, which the gateway is written for."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """httpx's clients load one certificate for each client, and not the 140 that take 40 ms.

    The tests, and the processes that they start, speak plain HTTP, or name their authority.
    """
    first, end, _ = Path(certifi.where()).read_text("ascii").partition("-----END CERTIFICATE-----")
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    path.write_text(first + end + "\n", "ascii")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes the longest come first, so that nobody waits for them at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
