"""The key that ``serve`` and ``picker`` make, as processes: who is told of it, who finds it."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from hetero_gateway.files.admin_key import find
from tests.fakes.processes import children_of, started, wait_for

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.yaml"
    instances = [{"id": "i0", "base_url": "http://127.0.0.1:9", "model": "m"}]
    path.write_text(yaml.safe_dump({"server": {"shutdown_timeout_s": 1}, "instances": instances}))
    return path


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the keys of this test's gateways lie."""
    path = tmp_path / "runtime"
    path.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path


def key_of(url: str) -> str:
    found = find(url)
    assert found is not None
    return found.key


def opens(url: str, key: str) -> bool:
    headers = {"authorization": f"Bearer {key}"}
    status = httpx.get(f"{url}/admin/instances", headers=headers, timeout=PATIENCE_S).status_code
    assert status in (200, 401)
    return status == 200


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--port", "0"),
        ("serve", "--port", "0", "--workers", "2"),
        ("picker", "--port", "0", "--http-port", "0"),
    ],
    ids=["one process", "workers", "picker"],
)
def test_commands_of_its_user_find_the_key_and_nothing_prints_it(arguments, config, runtime, run):
    with started(*arguments, "-c", str(config), "--log-level", "debug") as gateway:
        key = key_of(gateway.url)
        assert opens(gateway.url, key)
        assert not opens(gateway.url, key[:-1])
        port = gateway.url.rsplit(":", 1)[1]
        assert run("key", "admin", gateway.url).out == f"{key}\n"
        assert '"i0"' in run("status", f"http://localhost:{port}", "--json").out
        told = "".join(gateway.lines)
        assert f"hetero-gateway key admin {gateway.url}" in told
        assert gateway.stop() == 0
    assert key not in "".join(gateway.lines)
    assert not list(runtime.iterdir())


def test_whose_key_it_is_not_is_refused_and_told_of_the_option(config, run, monkeypatch):
    with started("serve", "-c", str(config), "--port", "0") as gateway:
        key = key_of(gateway.url)
        explained = run("explain", gateway.url, "--prompt-tokens", "9", code=1)
        assert "say which model" in explained.err
        link = run("key", "admin", gateway.url, "--link").out
        assert link == f"{gateway.url}/dashboard#key={key}\n"
        # A key that is named counts, and not the file's.
        monkeypatch.setenv("KEY_9", "wrong")
        run("status", gateway.url, "--admin-key-env", "KEY_9", code=1)
        run("key", "admin", "http://127.0.0.1:1", code=2)
        # Another user, or this one on another machine.
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(config.parent))
        assert "--admin-key-env" in run("status", gateway.url, code=1).err


def test_on_a_terminal_it_prints_the_link_once(config):
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hetero_gateway", "serve", "-c", str(config), "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=secondary,
    )
    os.close(secondary)
    text = ""
    try:
        while "policy" not in text or "\n" not in text.partition("policy")[2]:
            text += os.read(primary, 4096).decode()
        found = re.search(r"(http://\S+)/dashboard#key=([0-9a-f]{64})\)", text)
        assert found is not None
        url, key = found.groups()
        assert opens(url, key)
        assert key_of(url) == key
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        with contextlib.suppress(OSError):
            text += os.read(primary, 4096).decode()
        assert text.count(key) == 1
    finally:
        process.kill()
        process.wait()
        os.close(primary)


def test_each_start_has_a_key_of_its_own(config):
    keys = set()
    for _ in range(2):
        with started("serve", "-c", str(config), "--port", "0") as gateway:
            keys.add(key_of(gateway.url))
    assert len(keys) == 2


def test_with_workers_the_key_outlives_each_process_and_ends_with_the_supervisor(config, runtime):
    with started("serve", "-c", str(config), "--port", "0", "--workers", "2") as gateway:
        key = key_of(gateway.url)
        assert opens(gateway.url, key)
        before = children_of(gateway.process.pid)
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        old = set(before.values())
        wait_for("others", lambda: len(set(children_of(gateway.process.pid).values()) - old) == 3)

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{gateway.url}/version", timeout=PATIENCE_S).is_success
            return False

        wait_for("an answer", answers)
        assert key_of(gateway.url) == key
        assert opens(gateway.url, key)
        assert key not in "".join(gateway.lines)
        gateway.process.kill()
        wait_for("no key", lambda: not list(runtime.iterdir()))


def test_a_key_that_cannot_be_kept_costs_the_commands_alone(config, tmp_path, monkeypatch):
    nowhere = tmp_path / "nowhere"
    nowhere.write_text("no directory")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(nowhere))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / f"hetero-gateway-keys-{os.geteuid()}").mkdir(0o755)
    with started("serve", "-c", str(config), "--port", "0") as gateway:
        assert httpx.get(f"{gateway.url}/livez", timeout=PATIENCE_S).status_code == 200
        headers = {"authorization": "Bearer guessed"}
        answer = httpx.get(f"{gateway.url}/admin/instances", headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 401
        assert gateway.stop() == 0
    (line,) = (line for line in gateway.lines if "cannot be stored" in line)
    assert "server.admin_key_env" in line
    assert "Traceback" not in "".join(gateway.lines)
