"""The scripts for bare machines, really run, with a ``vllm`` on PATH that only answers /health."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.ports import free_port
from hetero_gateway.deploy.directory import render_deployment, write_deployment
from tests.deploy.plans import EACH_PLAN, ONE_MACHINE, options, plan
from tests.fakes.processes import alive, wait_for

PATIENCE_S = 60.0
NASTY = '/models/it\'s a "$HOME" `model` ${X} \\ }'
FAKE = f"""#!{sys.executable}
import http.server, json, os, subprocess, sys
words = sys.argv[1:]
port = int(words[words.index("--port") + 1])
if os.environ.get("FAKE_FAILS") == str(port):
    sys.exit("no such model")
# A process of its own, as vLLM has for each accelerator; it does not hear of SIGTERM.
worker = subprocess.Popen(["sleep", "1000"])
log = os.environ["FAKE_LOG"]
with open(f"{{log}}-{{port}}", "w") as file:
    json.dump({{"words": words, "pid": os.getpid(), "worker": worker.pid,
               "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}}, file)
os.rename(f"{{log}}-{{port}}", f"{{log}}/{{port}}.json")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Fakes:
    """What the fake ``vllm`` processes say of themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "seen"
        self.folder.mkdir()
        binaries = folder / "bin"
        binaries.mkdir()
        (binaries / "vllm").write_text(FAKE)
        (binaries / "vllm").chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "FAKE_LOG": str(self.folder),
            "STOP_TIMEOUT_S": "5",
        }

    def seen(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.iterdir())]


@pytest.fixture
def fakes(tmp_path) -> Fakes:
    return Fakes(tmp_path)


def written(folder: Path, planned=ONE_MACHINE, **changes) -> Path:
    """The script of the plan's only machine, on free ports."""
    (machine,) = planned.machines
    layout = planned.best.layouts[machine.id]
    port = free_port(in_a_row=len(layout))
    write_deployment(planned, options(first_port=port, **changes), folder / "a plan")
    return folder / "a plan" / "commands" / f"{machine.id}.sh"


@contextmanager
def running(script: Path, environment, cwd: Path) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [script],
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE_S)
        process.stderr.close()


def said(process: subprocess.Popen, words: str) -> list[str]:
    """Lines up to the one with these words."""
    lines = []
    for line in process.stderr:
        lines.append(line.strip())
        if words in line:
            return lines
    raise AssertionError(f"ended without {words!r}: {lines}")


@EACH_PLAN
def test_bash_accepts_every_script(planned, emulate, tmp_path):
    files = render_deployment(planned, options(emulate=emulate, model=NASTY))
    scripts = [text for name, text in files.items() if name.endswith(".sh")]
    assert scripts
    for text in scripts:
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert not done.stderr


@pytest.mark.system
def test_shellcheck_finds_nothing():
    text = render_deployment(ONE_MACHINE, options())["start.sh"]
    done = subprocess.run(
        ["shellcheck", "--severity=warning", "-"], input=text, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_script_starts_its_instances_and_stops_every_process_of_them(tmp_path, fakes, number):
    script = written(tmp_path, model=NASTY)
    run = script.parents[1] / "run"
    with running(script, fakes.environment, tmp_path) as process:
        said(process, "all 3 answer /health")
        seen = fakes.seen()
        for each in seen:
            port = each["words"][each["words"].index("--port") + 1]
            health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S)
            assert health.status_code == 200
        assert [s["devices"] for s in seen] == ["0,1,2,3", "4,5", "6"]
        assert [s["words"][:2] for s in seen] == [["serve", NASTY]] * 3
        assert {int(p.read_text()) for p in run.glob("*.pid")} == {s["pid"] for s in seen}
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
    pids = [pid for s in seen for pid in (s["pid"], s["worker"])]
    wait_for("their end", lambda: not any(map(alive, pids)))
    assert not list(run.glob("*.pid"))
    assert len(list(run.glob("*.log"))) == 3


def test_the_model_can_be_another_one(tmp_path, fakes):
    environment = fakes.environment | {"MODEL": "/my models/x"}
    with running(written(tmp_path), environment, tmp_path) as process:
        said(process, "answer /health")
        assert {s["words"][1] for s in fakes.seen()} == {"/my models/x"}


def test_a_checkpoint_that_nobody_knows_must_be_named(tmp_path, fakes):
    script = written(tmp_path, model=None, quantization="compressed-tensors")
    without = subprocess.run([script], env=fakes.environment, capture_output=True, text=True)
    assert without.returncode != 0
    assert "name a checkpoint" in without.stderr
    assert not fakes.seen()
    with running(script, fakes.environment | {"MODEL": "me/mine"}, tmp_path) as process:
        said(process, "answer /health")
        assert {s["words"][1] for s in fakes.seen()} == {"me/mine"}


def test_an_instance_that_does_not_start_ends_the_script_with_its_last_words(tmp_path, fakes):
    script = written(tmp_path)
    last = re.findall(r"--port (\d+)", script.read_text())[-1]
    with running(script, fakes.environment | {"FAKE_FAILS": last}, tmp_path) as process:
        said(process, "v100-box-tp1-0 has ended")
        said(process, "no such model")
        assert process.wait(PATIENCE_S) == 1
    pids = [pid for s in fakes.seen() for pid in (s["pid"], s["worker"])]
    wait_for("their end", lambda: not any(map(alive, pids)))


def test_a_second_start_is_refused_and_leaves_the_first_alone(tmp_path, fakes):
    script = written(tmp_path)
    with running(script, fakes.environment, tmp_path) as process:
        said(process, "answer /health")
        second = subprocess.run(
            [script], env=fakes.environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert second.returncode == 1
        assert "is running already" in second.stderr
        assert all(alive(s["pid"]) for s in fakes.seen())


def test_an_instance_that_ends_later_is_told_and_the_others_go_on(tmp_path, fakes):
    script = written(tmp_path, plan({"box": ("V100-32GB-NVLink2", 2, (1, 1))}))
    with running(script, fakes.environment, tmp_path) as process:
        said(process, "answer /health")
        first, second = fakes.seen()
        os.kill(first["pid"], signal.SIGKILL)
        said(process, "box-tp1-0 has ended")
        assert alive(second["pid"])
