"""The guide's page "Two gateways", as printed, on free ports."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from benchmarks.ports import free_port
from tests.cli.test_mistakes import answering
from tests.fakes.processes import Process, command, started, wait_for
from tests.fakes.redis import RedisServer, redis_server

pytestmark = pytest.mark.system

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "gateways.md"


def blocks(heading: str, kind: str) -> list[str]:
    """The blocks of a section, in order."""
    section = PAGE.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{kind}\n(.*?)```", section, re.S)


class Walk:
    """The page's first section: its commands, with its ports changed into free ones."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        ports = {number: str(free_port()) for number in ("8101", "8102", "8000", "8001")}
        self._ports = ports | {"6379": str(server.port)}
        self._blocks = [self._moved(each) for each in blocks("Try it on one machine", "sh")]
        (text,) = blocks("Try it on one machine", "yaml")
        self.file = folder / "gateway.yaml"
        self.file.write_text(self._moved(text), "utf-8")
        self.gateways: list[Process] = []

    def _moved(self, text: str) -> str:
        return re.sub(r"\b(6379|8101|8102|8000|8001)\b", lambda m: self._ports[m[1]], text)

    def run(self, stack: ExitStack) -> list[str]:
        """Runs them all; what those print that end."""
        printed = []
        for line in "".join(self._blocks).splitlines():
            program, *words = shlex.split(line)
            words = [str(self.file) if word == "gateway.yaml" else word for word in words]
            if program == "redis-server":
                continue  # it is there
            assert program == "hetero-gateway"
            if words[0] in ("emulate", "serve"):
                process = stack.enter_context(started(*words))
                if words[0] == "serve":
                    self.gateways.append(process)
                continue
            if words[0] == "status":
                wait_for("the other gateway", partial(_sees_one, *words))
            done = command(*words)
            assert done.returncode == 0, done.stdout + done.stderr
            printed.append(done.stdout)
        return printed


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def _sees_one(*words: str) -> bool:
    return "1 other" in command(*words).stdout


def ask(url: str) -> int:
    message = {"role": "user", "content": "Hello"}
    body = {"model": "Llama-3-8B", "messages": [message], "max_tokens": 2}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code


def test_both_serve_and_one_goes_on_without_the_other_and_without_redis(
    server: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        walk = Walk(server, tmp_path)
        checked, shown = walk.run(stack)
        assert re.search(rf"shared +ok +{server.url}/0: answers", checked)
        assert "shares load with 1 other gateway" in shown
        first, second = walk.gateways
        assert [ask(each.url) for each in walk.gateways] == [200, 200]
        assert first.stop() == 0
        assert "1 other" in shown
        wait_for("its end", lambda: "0 other" in command("status", second.url).stdout)
        server.kill()
        lost = "its view of other gateways is local"
        wait_for("the loss", lambda: lost in command("status", second.url).stdout)
        assert ask(second.url) == 200
        found = command("doctor", "-c", str(walk.file), second.url)
        assert found.returncode == 1
        gone = rf"shared +BAD +127.0.0.1:{server.port}: Connection refused"
        assert re.search(gone, found.stdout)
        told = [line for line in second.lines if "no news of other gateways" in line]
        assert len(told) <= 1


def test_a_redis_that_protects_itself_says_so(tmp_path: Path) -> None:
    """What a Redis without a password answers to other hosts, word for word."""
    long = b"-DENIED Redis is running in protected mode " + b"and says why at length. " * 45
    with answering(long + b"\r\n") as port:
        path = tmp_path / "gateway.yaml"
        path.write_text(f"scheduler: {{shared: 'redis://127.0.0.1:{port}'}}\ninstances: []\n")
        found = command("doctor", "-c", str(path))
    assert "DENIED Redis is running in protected mode" in found.stdout


def test_the_load_balancer_of_the_page_is_valid(tmp_path: Path) -> None:
    (text,) = (each for each in blocks("On two hosts", "text") if "bind :80" in each)
    path = tmp_path / "haproxy.cfg"
    path.write_text(text)
    done = subprocess.run(["haproxy", "-c", "-f", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
