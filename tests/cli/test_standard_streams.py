"""Standard input, output and error that are closed, full or read by nobody."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from benchmarks.ports import free_port
from tests.fakes.running import FAST

pytestmark = [pytest.mark.system, pytest.mark.slow]

CLUSTER = Path(__file__).parents[2] / "configs" / "clusters" / "paper-a.yaml"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
REDIRECTIONS = {
    "serve": ("2>/dev/full", ">&-", "<&- >&- 2>&-", "> >(exit) 2> >(exit)"),
    "workers": ("<&- >&- 2>&-",),
    "emulate": ("<&- >&- 2>/dev/full",),
    "picker": ("<&- >&- 2>/dev/full",),
}
# They print something, from /dev/null or a small file.
COMMANDS = [
    f"validate -c {CLUSTER}",
    "--help",
    "--version",
    "simulate --help",
    f"simulate -c {CLUSTER} --count 20 --rate 1 --policy round-robin --seeds 1",
]


def shell(words: list[str], redirection: str) -> subprocess.Popen[bytes]:
    command = " ".join([sys.executable, "-m", "hetero_gateway", *words, redirection])
    # bash closes what the command is to find closed, and is replaced by it.
    return subprocess.Popen(["bash", "-c", f"exec {command}"], stdin=subprocess.DEVNULL)


def words_of(kind: str, port: int, directory: Path) -> list[str]:
    if kind == "emulate":
        return ["emulate", "--profile", FAST, "--port", str(port), "--model", "m"]
    path = directory / "gateway.yaml"
    document = {
        "log": {"access": True},
        "server": {"port": port},
        "health": {"probe_interval_s": 0.2},
        "instances": [{"id": "a", "base_url": f"http://127.0.0.1:{free_port()}", "model": "m"}],
    }
    path.write_text(yaml.safe_dump(document))
    if kind == "picker":
        return ["picker", "-c", str(path), "--port", "0"]
    return ["serve", "-c", str(path), "--workers", "2" if kind == "workers" else "1"]


def asked(port: int, path: str, body: bytes | None = None) -> int | None:
    """The status; None: nobody is there."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


@FULL
@pytest.mark.parametrize(
    ("kind", "redirection"),
    [(kind, redirection) for kind, each in REDIRECTIONS.items() for redirection in each],
)
def test_what_serves_goes_on_and_ends_well(kind, redirection, tmp_path):
    port = free_port()
    process = shell(words_of(kind, port, tmp_path), redirection)
    try:
        until_s = time.monotonic() + 120
        while asked(port, "/health") is None:
            assert process.poll() is None, "it has ended"
            assert time.monotonic() < until_s
            time.sleep(0.1)
        for _ in range(5):  # each has a line in the access log, and in the other one as it fails
            status = asked(port, "/v1/completions", b'{"model": "m", "prompt": "x"}')
            assert status is not None
        assert asked(port, "/health") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def run(words: str, redirection: str) -> tuple[int, str]:
    """Its exit code, and standard error unless that is redirected."""
    process = subprocess.run(
        ["bash", "-c", f"exec {sys.executable} -m hetero_gateway {words} {redirection}"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=300,
        check=False,
    )
    return process.returncode, process.stderr.decode()


@pytest.mark.parametrize(
    ("words", "redirection", "reason"),
    [
        *(
            pytest.param(words, "> /dev/full", "No space left on device", marks=FULL)
            for words in COMMANDS
        ),
        (COMMANDS[0], ">&-", "Bad file descriptor"),
        ("--help", ">&-", "Bad file descriptor"),
    ],
)
def test_output_that_cannot_be_written_is_one_line(words, redirection, reason):
    code, said = run(words, redirection)
    assert code == 1
    *progress, last = said.splitlines()
    assert last == f"hetero-gateway: standard output cannot be written: {reason}"
    assert not progress or words.startswith("simulate -c")
    assert "Traceback" not in said


@pytest.mark.parametrize("redirection", [pytest.param("2> /dev/full", marks=FULL), "2>&-"])
def test_errors_that_cannot_be_shown_have_their_exit_code(redirection):
    assert run(f"validate -c {CLUSTER}", redirection)[0] == 0
    assert run("validate -c /nowhere.yaml", redirection)[0] == 2
    assert run("validate --nonsense", redirection)[0] == 2


def test_nothing_is_opened_where_the_streams_were():
    code = (
        "import os, sys, hetero_gateway.cli.standard_streams as s; s.prepare(); "
        "f = os.open('/dev/null', os.O_RDONLY); os.write(9, b'%d' % f); sys.exit(f < 3)"
    )
    reading, writing = os.pipe()
    done = subprocess.run(
        ["bash", "-c", f'exec {sys.executable} -c "{code}" 9>&{writing} <&- >&- 2>&-'],
        pass_fds=(writing,),
        check=False,
    )
    os.close(writing)
    with os.fdopen(reading) as output:
        said = output.read()
    assert done.returncode == 0
    assert re.fullmatch(r"\d+", said)
    assert int(said) > 2


def test_a_reader_that_has_left_is_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "hetero_gateway", "validate", "-c", str(CLUSTER)],
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 141
    assert done.stderr == b""
