import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import certifi
import hypothesis
import pytest
from httpx._transports import default

from tests.fakes.admin_key import send_keys

# With it jsonschema makes a grammar of addresses, a second of CPU and more, for a format ("iri")
# that no schema here asks for.
sys.modules["rfc3987_syntax"] = None

# A background job of a shell without job control ignores SIGINT, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """A busy machine must not fail a law, and a failure must come back when it is tried again."""
    laws = hypothesis.settings(deadline=None, derandomize=True, max_examples=30)
    hypothesis.settings.register_profile("tests", laws)
    hypothesis.settings.load_profile("tests")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """What is imported and collected stays to the end: nobody looks for garbage in it again."""
    if worker := getattr(session.config, "workerinput", None):
        number = int(worker["workerid"].removeprefix("gw"))
        session.config.args = turned(session.config.args, number / worker["workercount"])
    gc.disable()
    yield
    gc.freeze()
    # Tests leave little behind: to look for it as often as usual takes a twentieth of the time.
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


def turned(args: list[str], share: float) -> list[str]:
    """What is to be collected, from so far on: each process begins elsewhere, and finds compiled
    what another has compiled in the meantime.
    """
    parts: list[str] = []
    for arg in args:
        inside = (p for p in Path(arg).glob("*") if p.is_dir() or p.match("test_*.py"))
        parts += sorted(map(str, inside)) or [arg]
    first = int(share * len(parts))
    return parts[first:] + parts[:first]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Everything runs on asyncio, which the gateway is written for."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """httpx's clients load one certificate, and not the 140 that take 40 ms, and once for all.

    The tests, and the processes that they start, speak plain HTTP, or name their authority.
    """
    first, end, _ = Path(certifi.where()).read_text("ascii").partition("-----END CERTIFICATE-----")
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    path.write_text(first + end + "\n", "ascii")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        patch.setattr(default, "create_ssl_context", cache(default.create_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _keys_of_gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The keys that gateways make for /admin lie in a folder of the tests, which send them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        send_keys(patch)
        yield


@pytest.fixture(autouse=True)
def _environment_as_found() -> Iterator[None]:
    """Gateways read the environment: what one test left there would be another's."""
    found = set(os.environ)
    yield
    assert set(os.environ) - found <= {"PYTEST_CURRENT_TEST"}


# Tests that one process runs, one after the other, by how their ids begin. The names of groups
# come from here and not from marks: with pytest 9.2, xdist 3.8 does not see the marks (its issue
# 1386).
TOGETHER = {
    # They share servers, or what else is expensive to make.
    "tests/cli/test_plan_again.py": "plan again",
    "tests/docker/test_commands.py": "docker",
    "tests/e2e/test_client_programs.py": "client programs",
    "tests/e2e/test_openai_client.py": "openai",
    "tests/e2e/test_wheel.py": "wheel",
    "tests/gateway/test_leaving_clients.py": "leaving clients",
    "tests/gateway/dataplane/test_predictor.py": "installed predictors",
    "tests/serve/processes/test_processes.py": "processes",
    "tests/test_budgets.py": "budgets",
    "tests/test_compiled.py": "mypyc",
    # What is compiled by numba, which takes a minute and more for finish-time's loop: once, as the
    # others read it from disk.
    "tests/cli/test_plan.py": "compiled",
    "tests/planner": "compiled",
    "tests/cli/reports/test_plan_table.py": "compiled",
    "tests/sim/compiled/test_loops.py::test_by_numba": "compiled",
    "tests/sim/compiled/test_own_price.py": "compiled",
    "tests/sim/test_block_cache.py::test_the_compiled": "compiled",
    "tests/sim/test_cluster.py::test_compiled": "compiled",
    "tests/sim/test_fleet.py": "compiled",
    "tests/sim/test_prefixes.py::test_compiled": "compiled",
}
# What takes longest, or what others wait for.
FIRST = ("compiled", "mypyc", "leaving clients", "budgets")
# When the last of the slow ones is begun, as a share of the others.
SLOW_UNTIL = 0.7


def group_of(nodeid: str) -> str:
    return next((group for start, group in TOGETHER.items() if nodeid.startswith(start)), nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """In several processes the longest come first, so that nobody waits for them at the end."""
    if not hasattr(config, "workerinput"):
        yield
        return
    # As if none had begun elsewhere, before pytest puts together what shares a fixture.
    items.sort(key=lambda item: item.location[0])
    yield
    slow = {group_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    groups = dict.fromkeys(group_of(item.nodeid) for item in items)
    order = {group: number for number, group in enumerate(in_turns(list(groups), slow))}
    items.sort(key=lambda item: order[group_of(item.nodeid)])


def in_turns(groups: list[str], slow: set[str]) -> list[str]:
    """The order in which processes take them: who waits is to have somebody beside it who works.

    The slow ones, which wait more than they work, are spread among the others, and end before them.
    """
    first = [group for group in FIRST if group in groups]
    waiting = [group for group in groups if group in slow and group not in first]
    working = [group for group in groups if group not in slow and group not in first]
    places = {group: i / len(working) for i, group in enumerate(working)}
    places |= {group: SLOW_UNTIL * i / len(waiting) for i, group in enumerate(waiting)}
    return first + sorted(places, key=lambda group: places[group])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Hands out tests one by one, but for those of a group."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduling(config, log)
