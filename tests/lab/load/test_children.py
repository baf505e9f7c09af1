import contextlib
import sys
from pathlib import Path

import pytest

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.lab.load import children as module
from hetero_gateway.lab.load.children import Child, Children
from tests.fakes.processes import until

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks for processes in /proc"
)

_SERVING = (
    "import sys, time; "
    "print('serving on http://127.0.0.1:4711 now', file=sys.stderr, flush=True); time.sleep(60)"
)
_STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_SERVING}"
_FORKING = f"import os; os.fork(); {_STUBBORN}"


@pytest.fixture(autouse=True)
def _scripts_instead_of_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``start(name, SCRIPT)`` runs the script: -c in place of -m hetero_gateway."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "$3"\n', encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(python))
    monkeypatch.setattr(module, "_STOP_TIMEOUT_S", 0.5)


def group_is_alive(leader: int) -> bool:
    """Whether any process of the group still runs; one that has ended but is unreaped does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rsplit(")", 1)[1].split()[:3]
            if int(group) == leader and state != "Z":
                return True
    return False


async def test_a_child_tells_its_address(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("one", _SERVING)
        assert await child.url() == "http://127.0.0.1:4711"
        children.check()
    assert child.process.returncode == -15


async def test_a_child_that_fails_to_start_is_shown_by_its_last_line(tmp_path: Path) -> None:
    script = "import sys; print('first', file=sys.stderr); sys.exit('no such profile')"
    with Children(tmp_path) as children, pytest.raises(HeteroGatewayError) as error:
        await children.start("the emulator", script).url()
    assert str(error.value) == "the emulator ended with code 1: no such profile"


async def test_a_silent_child_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.2)
    with (
        Children(tmp_path) as children,
        pytest.raises(HeteroGatewayError, match=r"one did not start .* it said nothing"),
    ):
        await children.start("one", "import time; time.sleep(60)").url()


@pytest.mark.parametrize("script", [_SERVING, _STUBBORN, _FORKING])
async def test_an_exception_leaves_no_process_behind(tmp_path: Path, script: str) -> None:
    started: list[Child] = []

    async def fail() -> None:
        with Children(tmp_path) as children:
            for name in ("one", "two"):
                started.append(children.start(name, script))
                await started[-1].url()
            assert all(group_is_alive(child.process.pid) for child in started)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    # Those that it forked have been killed, and go when the kernel comes to them.
    await until(
        lambda: not any(group_is_alive(child.process.pid) for child in started), within_s=20
    )


async def test_one_child_can_be_stopped_alone(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        one, two = children.start("one", _SERVING), children.start("two", _SERVING)
        await two.url()
        children.stop(one)
        children.check()
        assert not group_is_alive(one.process.pid)
        assert group_is_alive(two.process.pid)
    assert not group_is_alive(two.process.pid)
