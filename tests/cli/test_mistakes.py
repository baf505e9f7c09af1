"""Mistakes that people make: what is told says what, where, and the mend, and is no traceback."""

import contextlib
import errno
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.http import clients
from hetero_gateway.http.listening import cannot_listen
from hetero_gateway.lab.load.unreachable import why_unreachable
from tests.fakes.gateway_files import instance, write

NOT_FOUND = (
    b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 65\r\n\r\n"
    b'{"error": {"message": "The model `nosuch` does not exist here."}}'
)


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A port where whatever is asked gets these bytes, and is closed then; b"": at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(10)
                        if connection.recv(65536) and answer:
                            connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def gateway_file(folder: Path) -> str:
    return str(write(folder / "gateway.yaml", {"instances": [instance()]}))


# By what was mistaken: what stands in a file, what the other end answers, the command ({file},
# {port}, {folder}), and what has to be told.
MISTAKES: dict[str, tuple[str | None, bytes | None, str, tuple[str, ...]]] = {
    "an empty file": ("", None, "validate -c {file}", ("gateway.yaml: there is nothing in it",)),
    "a list": ("- 1\n", None, "validate -c {file}", ("mapping of keys (`name: value`)", "a list")),
    "a tab": (
        "server:\n\tport: 1\n", None, "validate -c {file}",
        ("gateway.yaml:2:", "indented by a tab; YAML wants spaces"),
    ),
    "an unclosed quote": (
        'server:\n  host: "127.0.0.1\n  port: 8000\ninstances: []\n', None, "validate -c {file}",
        ("gateway.yaml:2:", "the quote that begins here does not end"),
    ),
    "a command that is none": (None, None, "server", ("'server'", "did you mean serve?")),
    "a record that cannot be written": (
        "instances: []\n", None, "serve -c {file} --record /proc/record.jsonl",
        ("--record /proc/record.jsonl: cannot be written",),
    ),
    "TLS to a plain port": (
        None, b"HTTP/1.1 400 Bad Request\r\n\r\n", "status https://127.0.0.1:{port}",
        ("speaks plain HTTP there: write http://127.0.0.1:{port}",),
    ),
    "load by TLS to a plain port": (
        None, b"HTTP/1.1 400 Bad Request\r\n\r\n", "bench https://127.0.0.1:{port} --limit 1",
        ("speaks plain HTTP there: write http://127.0.0.1:{port}",),
    ),
    "plain HTTP to TLS": (
        None, b"", "status http://127.0.0.1:{port}",
        ("If it speaks TLS there, write https://127.0.0.1:{port}",),
    ),
    "a model that nobody serves": (
        None, NOT_FOUND, "bench http://127.0.0.1:{port} --limit 2 --rate inf --model nosuch",
        ("2 × http_404 (The model `nosuch` does not exist here.)",),
    ),
    "an emulated instance on a port that is taken": (
        None, b"", "emulate --profile V100-32GB-NVLink2/Llama-3-8B/tp1 --port {port}",
        ("the port is taken", "give another one by --port"),
    ),
    "an address of clients": (
        None, NOT_FOUND, "status http://127.0.0.1:{port}/v1", ("does not exist here",),
    ),
    "authorities that are not there": (
        None, None, "status https://127.0.0.1:1 --ca-file {folder}/none.pem",
        ("--ca-file", "none.pem: there is no such file"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_mend(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hetero_gateway.cli import main

    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    text, answer, words, told = MISTAKES[name]
    file = tmp_path / "gateway.yaml"
    if text is not None:
        file.write_text(text)
    with answering(answer) if answer is not None else contextlib.nullcontext(1) as port:
        names = {"file": file, "port": port, "folder": tmp_path}
        try:
            code = main(words.format(**names).split())
        except SystemExit as end:  # of argparse
            code = int(end.code or 0)
    said = capsys.readouterr().err
    assert code in (1, 2)
    for part in told:
        assert part.format(**names) in said, said
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("hetero-gateway: ")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EADDRINUSE, "x"), ("is taken", "--port", "ss -ltnp 'sport = :8000'")),
        (OSError(errno.EADDRNOTAVAIL, "x"), ("no such address", "0.0.0.0")),
        (OSError(errno.EACCES, "x"), ("below 1024",)),
        (socket.gaierror(-2, "x"), ("no such host name",)),
        (OSError(errno.EIO, "broken"), ("broken",)),
    ],
)
def test_a_gateway_that_cannot_listen_says_why(error: OSError, told: tuple[str, ...]) -> None:
    said = cannot_listen("::1", 8000, error)
    assert said.startswith("cannot listen on [::1]:8000: ")
    assert all(part in said for part in told)


@pytest.mark.parametrize(
    ("scheme", "cause", "told"),
    [
        ("https", ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong"), "write http://a:1"),
        ("http", ConnectionRefusedError(errno.ECONNREFUSED, "x"), "nobody listens there"),
        ("http", ValueError("odd"), "odd"),
    ],
)
def test_why_a_url_does_not_answer(scheme: str, cause: Exception, told: str) -> None:
    error = RuntimeError(str(cause))
    error.__cause__ = ExceptionGroup("several addresses", [cause])
    assert told in why_unreachable(f"{scheme}://a:1", error)


def test_a_certificate_that_is_not_trusted_is_told_with_the_flag_that_helps() -> None:
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_message = "self-signed certificate"
    said = why_unreachable("https://a:1", error)
    assert "self-signed certificate" in said
    assert "--ca-file" in said


def test_too_few_files_are_told_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(ConfigError, match=r"may open 20 files.*ulimit -n"):
        clients.check_descriptor_limit()


@pytest.mark.slow
def test_ctrl_c_twice_and_a_foreign_address_leave_no_traceback(tmp_path: Path) -> None:
    file = gateway_file(tmp_path)
    run: Callable[..., subprocess.Popen[str]] = lambda *words: subprocess.Popen(  # noqa: E731
        [sys.executable, "-m", "hetero_gateway", "serve", "-c", file, *words],
        stderr=subprocess.PIPE,
        text=True,
    )
    foreign = run("--host", "192.0.2.7", "--port", "18999")
    told = foreign.communicate(timeout=60)[1]
    assert foreign.returncode == 1
    assert told.splitlines()[-1].endswith(
        "this machine has no such address; 0.0.0.0 is all that it has"
    )
    assert "Traceback" not in told
    served = run("--port", "0")
    assert served.stderr is not None
    lines = []
    for line in served.stderr:
        lines.append(line)
        if "serving on" in line:
            break
    for _ in range(2):
        os.kill(served.pid, signal.SIGINT)
    told = "".join(lines) + served.stderr.read()
    served.wait(60)
    served.stderr.close()
    assert "Traceback" not in told
