"""The demo as a person runs it: a process, its signals, and what it leaves behind."""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from hetero_gateway.cli import demo as demo_command
from hetero_gateway.cli import parse
from hetero_gateway.errors import HeteroGatewayError
from tests.fakes.children import task_children
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.processes import alive

_DEADLINE_S = 180.0


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hetero_gateway", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        cwd=cwd,
        # Without this the test's own SIGINT handling would be inherited where it is "ignore".
        start_new_session=True,
    )


def parsed(*words: str) -> argparse.Namespace:
    return parse(["demo", *words])


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the demo's temporary files go; empty again when it has ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.glob("hetero-gateway-demo-*")) == []


def until(condition: Callable[[], object], demo: subprocess.Popen[str]) -> None:
    give_up_s = time.monotonic() + _DEADLINE_S
    while not condition():
        assert demo.poll() is None
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def imports(demo: subprocess.Popen[str]) -> bool:
    """Whether a library that only ``main`` loads is there."""
    return "pydantic_core" in Path(f"/proc/{demo.pid}/maps").read_text()


def is_loaded(folder: Path) -> bool:
    """Whether the gateway, whose log is the third, has requests in flight."""
    text = "".join(log.read_text() for log in folder.glob("hetero-gateway-demo-*/3.log"))
    if found := re.search(r"serving on (http://[\d.:]+)", text):
        listed = httpx.get(f"{found[1]}/admin/instances", timeout=_DEADLINE_S).json()
        return any(instance["in_flight"] for instance in listed["instances"])
    return False


def finish(demo: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return demo.communicate(timeout=_DEADLINE_S)
    finally:
        demo.kill()


pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks for processes in /proc"
)


async def test_the_demo_compares_three_policies(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tasks in place of its processes, and virtual time: whatever else the machine does."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    async with task_children() as children:
        monkeypatch.setattr("hetero_gateway.cli.demo.Children", children)
        words = parsed("--seconds", "2", "--port", "0", "--json")
        assert await demo_command._until_signal(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["caution"] is None
    names = [result["policy"] for result in document["results"]]
    assert names == ["round-robin", "capacity-weighted", "finish-time"]
    for result in document["results"]:
        assert (result["errors"], result["requests"]) == (0, document["requests"])
        assert {i["id"] for i in result["instances"]} == {"v100-tp1", "v100-tp4"}
        assert sum(i["requests"] for i in result["instances"]) == document["requests"]
        # The load generator forces the length, so every policy carried the same tokens.
        assert result["output_tokens"] == document["results"][0]["output_tokens"]
    round_robin = {i["id"]: i["requests"] for i in document["results"][0]["instances"]}
    assert abs(round_robin["v100-tp1"] - round_robin["v100-tp4"]) <= 1
    assert document["conclusion"].startswith("In this run finish-time ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "children"),
    # While modules load, with emulators starting, and with the gateway under load.
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, 2),
        pytest.param(signal.SIGINT, 3, marks=pytest.mark.system),
    ],
)
def test_a_signal_at_any_moment_leaves_no_process_and_no_traceback(
    scratch: Path, number: signal.Signals, children: int
) -> None:
    demo = start("--seconds", "30", "--port", "0", cwd=scratch)
    until(lambda: imports(demo), demo)
    until(lambda: len(children_of(demo.pid)) >= children, demo)
    if children == 3:
        until(lambda: is_loaded(scratch), demo)
    pids = children_of(demo.pid)
    demo.send_signal(number)
    _, err = finish(demo)
    assert demo.returncode == 128 + number
    assert "Traceback" not in err
    assert not any(map(alive, pids))


@pytest.mark.system
@pytest.mark.slow
def test_keep_serves_until_interrupted(scratch: Path) -> None:
    demo = start("--seconds", "1", "--port", "0", "--keep", cwd=scratch)
    assert demo.stdout is not None
    url = ""
    for line in demo.stdout:
        if "dashboard" in line and "http" in line:
            url = line.split()[1].removesuffix("/dashboard")
        if "curl" in line:
            break
    until(lambda: len(children_of(demo.pid)) >= 3, demo)
    pids = children_of(demo.pid)
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    answer = httpx.post(
        f"{url}/v1/chat/completions", json={"model": "Llama-3-8B", **asked}, timeout=_DEADLINE_S
    )
    assert answer.status_code == 200
    assert answer.headers["x-hetero-gateway-instance"] in ("v100-tp4", "v100-tp1")
    assert httpx.get(f"{url}/dashboard", timeout=_DEADLINE_S).status_code == 200
    demo.send_signal(signal.SIGINT)
    _, err = finish(demo)
    assert demo.returncode == 0
    assert "Traceback" not in err
    assert not any(map(alive, pids))


def test_a_child_that_cannot_start_is_named_with_its_reason(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children_of(os.getpid())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setitem(demo_command.INSTANCES, "v100-tp1", "no/such/profile")
    monkeypatch.setattr(tempfile, "tempdir", None)
    args = parsed("--port", "0")
    with pytest.raises(HeteroGatewayError, match=r"v100-tp1 ended with code 2: .*no/such/profile"):
        args.run(args)
    assert children_of(os.getpid()) == before


def test_a_taken_port_that_was_asked_for_is_refused(scratch: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        demo = start("--port", str(port), cwd=scratch)
        _, err = finish(demo)
    assert demo.returncode == 2
    assert f"--port {port}: cannot listen there" in err
    assert "Traceback" not in err
