"""Fixtures of the tests on real vLLM servers, which scripts/real-vllm starts."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from real_vllm.cluster import Cluster
from real_vllm.servers import PAIR, load_server

from tests.real_vllm.kv_pair import Pair

FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def servers() -> Iterator[Cluster]:
    directory = os.environ.get("HETERO_GATEWAY_REAL_VLLM")
    if not directory:
        pytest.skip("scripts/real-vllm runs these")
    cluster = Cluster(Path(directory))
    yield cluster
    cluster.http.close()


@pytest.fixture
def cluster(servers: Cluster) -> Iterator[Cluster]:
    """Both instances up before a test; every load exactly 0 after it, whatever the test did."""
    servers.restore()
    servers.assert_idle()
    yield servers
    servers.assert_idle()


@pytest.fixture(scope="session")
def engines() -> Iterator[Pair]:
    directory = Path(os.environ.get("HETERO_GATEWAY_REAL_VLLM", "-"))
    states = [directory / f"{name}.json" for name in PAIR]
    if not all(state.is_file() for state in states):
        pytest.skip("scripts/real-vllm --pair runs these")
    found = Pair(*map(load_server, states))
    yield found
    found.http.close()


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    """Both are there, before a test and after it."""
    engines.restore()
    yield engines
    engines.restore()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line of figures at the end of the run."""
    return request.config.stash.setdefault(FIGURES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = terminalreporter.config.stash.get(FIGURES, [])
    if lines:
        terminalreporter.section("figures")
    for line in lines:
        terminalreporter.write_line(line)
