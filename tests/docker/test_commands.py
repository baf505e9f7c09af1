"""Every command of the container files, run as a plain process instead of in a container.

Commands come from the files themselves. Only what a container network would provide is rewritten:
addresses become loopback, ports become free ones, mounted paths become files of the test.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.ports import free_port
from tests.fakes.processes import wait_for

PATIENCE_S = 60.0


def argv(files, command: list[str]) -> list[str]:
    """A container's command as this machine runs it; ours with the image's entrypoint."""
    if command[0] in ("emulate", "serve", "validate"):
        assert json.loads(files.last("ENTRYPOINT")) == ["hetero-gateway"]
        return [sys.executable, "-m", "hetero_gateway", *command]
    if command[0] == "python":
        return [sys.executable, *command[1:]]
    return command


def environment(files) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(files.root / "src"), "PYTHONUNBUFFERED": "1"}


class Running:
    """A process in a session of its own, its output in a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def output(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    def port(self) -> int:
        def probe() -> int | None:
            assert self.process.poll() is None, f"exited {self.process.returncode}: {self.output}"
            match = re.search(r"(?:127\.0\.0\.1|localhost):([1-9]\d*)", self.output)
            return int(match.group(1)) if match else None

        return wait_for(f"the port in {self.log.name}", probe)

    def has_descendants(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@contextmanager
def running(files, command: list[str], cwd: Path, log: Path) -> Iterator[Running]:
    """Runs a command; at the end sends what ``docker stop`` sends and waits for the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv(files, command),
            cwd=cwd,
            env=environment(files),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    instance = Running(process, log)
    try:
        yield instance
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=PATIENCE_S)
        wait_for(f"the end of {log.name}", lambda: not instance.has_descendants())
    finally:
        if instance.has_descendants():
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode in (0, -signal.SIGTERM), instance.output
    assert "Traceback" not in instance.output, instance.output


def replaced(command: list[str], changes: dict[str, str]) -> list[str]:
    """The command with each option's value changed; the option has to be there."""
    result = list(command)
    for option, value in changes.items():
        result[result.index(option) + 1] = value
    return result


class Stack:
    """compose.yaml's own services, running: container address to port on loopback."""

    def __init__(self, addresses: dict[str, str], services: dict[str, Any]) -> None:
        self.addresses = addresses
        self.services = services

    @property
    def gateway_url(self) -> str:
        return f"http://{self.addresses['gateway:8000']}"

    def rewrite(self, text: str) -> str:
        for container_address, address in self.addresses.items():
            text = text.replace(container_address, address)
        return text

    @property
    def chat_url(self) -> str:
        return f"{self.gateway_url}/v1/chat/completions"

    def body(self, **more: Any) -> dict[str, Any]:
        message = {"role": "user", "content": "Hello"}
        return {"model": "llama-3-8b", "messages": [message], "max_tokens": 8, **more}

    def chat(self, **more: Any) -> httpx.Response:
        return httpx.post(self.chat_url, json=self.body(**more), timeout=PATIENCE_S)

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        """A stream that has begun and would go on for longer than a test; closed by leaving."""
        body = self.body(stream=True, max_tokens=4000, ignore_eos=True)
        with httpx.stream("POST", self.chat_url, json=body, timeout=PATIENCE_S) as answer:
            chunks = answer.iter_bytes()  # the response closes when its iterator is collected
            assert b"chat.completion.chunk" in next(chunks)
            yield


@pytest.fixture(scope="module")
def stack(files, tmp_path_factory) -> Iterator[Stack]:
    services = files.compose("compose.yaml")["services"]
    logs = tmp_path_factory.mktemp("logs")
    cwd = tmp_path_factory.mktemp("cwd")
    stack = Stack({}, services)
    with ExitStack() as stop:
        for name, service in services.items():
            command = service.get("command", [""])
            if command[0] == "emulate":
                command = replaced(command, {"--host": "127.0.0.1", "--port": "0"})
                process = stop.enter_context(running(files, command, cwd, logs / name))
                stack.addresses[f"{name}:8000"] = f"127.0.0.1:{process.port()}"

        config = yaml.safe_load(stack.rewrite(files.gateway_config("compose.yaml").read_text()))
        config["server"]["port"] = 0
        config_path = logs / "gateway.yaml"
        config_path.write_text(yaml.safe_dump(config), "utf-8")
        command = services["gateway"].get("command") or json.loads(files.last("CMD"))
        command = replaced(command, {"-c": str(config_path), "--host": "127.0.0.1"})
        process = stop.enter_context(running(files, command, cwd, logs / "gateway"))
        stack.addresses["gateway:8000"] = f"127.0.0.1:{process.port()}"
        wait_for(
            "a ready gateway",
            lambda: httpx.get(f"{stack.gateway_url}/readyz", timeout=PATIENCE_S).status_code == 200,
        )
        yield stack
    # The containers' file systems are read-only.
    assert list(cwd.iterdir()) == []


def health_command(files, services: dict[str, Any], name: str) -> list[str]:
    if "healthcheck" in services[name]:
        return list(services[name]["healthcheck"]["test"][1:])
    command: list[str] = json.loads(files.last("HEALTHCHECK").partition("CMD ")[2])
    return command


def run_health_check(files, command: list[str], port: int) -> int:
    command = [word.replace("8000", str(port)) for word in command]
    return subprocess.run(argv(files, command), capture_output=True, timeout=PATIENCE_S).returncode


@pytest.mark.slow
def test_a_chat_request_goes_through_the_gateway_to_an_emulated_instance(stack):
    answer = stack.chat()
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-hetero-gateway-instance"] in ("v100-tp4", "v100-tp1")
    body = answer.json()
    assert body["model"] == "llama-3-8b"
    assert body["usage"]["completion_tokens"] == 8


def test_every_health_check_passes_on_a_live_service_and_fails_on_a_dead_one(files, stack):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        for address, actual in stack.addresses.items():
            command = health_command(files, stack.services, address.partition(":")[0])
            assert run_health_check(files, command, int(actual.rpartition(":")[2])) == 0, address
            assert run_health_check(files, command, unused.getsockname()[1]) != 0, address


def test_a_health_check_fails_when_the_path_does_not_answer_200(files, stack):
    # The gateway's own check, put to an instance: it has no /livez.
    command = health_command(files, stack.services, "gateway")
    port = int(stack.addresses["v100-tp1:8000"].rpartition(":")[2])
    assert run_health_check(files, command, port) != 0


def test_the_gateway_exposes_the_metrics_that_the_dashboard_shows(stack, metrics):
    assert stack.chat(stream=True).status_code == 200
    text = httpx.get(f"{stack.gateway_url}/metrics", timeout=PATIENCE_S).text
    exposed = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(text)
        if family.name.startswith("hetero_gateway_")
    }
    for name, (kind, labels) in metrics.items():
        assert name in exposed, name
        assert exposed[name].type == kind, name
        for sample in exposed[name].samples:
            assert set(sample.labels) - {"le"} == labels, sample


def test_the_instances_expose_the_engine_series_that_the_dashboard_overlays(files, stack):
    wanted = set(re.findall(r"vllm:\w+", " ".join(files.dashboard_expressions())))
    assert wanted
    text = httpx.get(f"http://{stack.addresses['v100-tp4:8000']}/metrics", timeout=PATIENCE_S).text
    missing = [n for n in wanted if not re.search(rf'^{n}{{.*model_name="llama-3-8b"', text, re.M)]
    assert missing == []


@pytest.mark.slow
def test_the_vllm_configuration_is_valid(files):
    done = subprocess.run(
        argv(files, ["validate", "-c", str(files.gateway_config("compose.vllm.yaml"))]),
        env=environment(files),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> dict[str, Any]:
        answer = httpx.get(
            f"{self.url}/api/v1/query", params={"query": expression}, timeout=PATIENCE_S
        ).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        data: dict[str, Any] = answer["data"]
        return data

    def values(self, expression: str) -> dict[str, float]:
        return {
            series["metric"].get("backend", ""): float(series["value"][1])
            for series in self.query(expression)["result"]
        }


@pytest.fixture
def prometheus(files, stack, tmp_path) -> Iterator[Prometheus]:
    """compose.yaml's Prometheus command on its own files, targets and paths rewritten."""
    service = stack.services["prometheus"]
    etc = tmp_path / "etc"
    etc.mkdir()
    for target, source in files.mounts(service).items():
        assert Path(target).parent == Path("/etc/prometheus")
        text = stack.rewrite(source.read_text("utf-8")).replace("interval: 5s", "interval: 1s")
        (etc / Path(target).name).write_text(text, "utf-8")
    paths = {"/etc/prometheus": str(etc), "=/prometheus": f"={tmp_path / 'data'}"}
    command = ["prometheus"]
    for word in service["command"]:
        for container_path, path in paths.items():
            word = word.replace(container_path, path)
        command.append(word)
    port = free_port()
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with running(files, command, tmp_path, tmp_path / "prometheus.log") as process:
        server = Prometheus(f"http://127.0.0.1:{port}")

        def ready() -> bool:
            assert process.process.poll() is None, process.output
            try:
                return httpx.get(f"{server.url}/-/ready", timeout=PATIENCE_S).status_code == 200
            except httpx.TransportError:
                return False

        wait_for("Prometheus", ready)
        yield server


@pytest.mark.system
def test_prometheus_scrapes_the_gateway_and_the_instances(files, stack, prometheus):
    ids = {"v100-tp4", "v100-tp1"}
    # The gateway's own target is about no backend.
    wait_for("three targets up", lambda: prometheus.values("up == 1").keys() == ids | {""} or None)
    assert prometheus.values("hetero_gateway_instance_up") == dict.fromkeys(ids, 1.0)
    assert prometheus.values("vllm:num_requests_running").keys() == ids

    counted = 'sum(hetero_gateway_requests_total{model="llama-3-8b", outcome="completed"})'
    before = prometheus.values(counted).get("", 0.0)
    for _ in range(4):
        assert stack.chat(stream=True).status_code == 200
    wait_for("the requests", lambda: prometheus.values(counted).get("", 0.0) == before + 4)

    # The answering instance is the series' `backend`, Prometheus's target its `instance`.
    by_backend = prometheus.values("sum by (backend) (hetero_gateway_requests_total)")
    assert by_backend.keys() == ids | {""}  # nothing was refused, and that counter is there too
    assert sum(by_backend.values()) >= before + 4
    gateway = stack.addresses["gateway:8000"]
    one = prometheus.values(f'hetero_gateway_instance_up{{instance="{gateway}"}}')
    assert one.keys() == ids
    rules = httpx.get(f"{prometheus.url}/api/v1/rules", timeout=PATIENCE_S).json()["data"]["groups"]
    assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}


@pytest.mark.system
def test_every_query_of_the_dashboard_has_data_under_load(files, stack, prometheus):
    # These stay empty while nothing goes wrong, and nothing is split. Drift takes more traffic than
    # this, and the age of a profile a date, which the built-in ones do not have.
    later = (
        *("retries_total", "upstream_errors_total", "queue_rejections_total"),
        *("client_timeouts_total", "client_refusals_total", "ejections_total"),
        *("predictor_failures_total", "_profile_", "refused_pairs"),
    )
    expressions = [e for e in files.dashboard_expressions() if not any(x in e for x in later)]

    def empty() -> list[str]:
        return [e for e in expressions if not prometheus.query(e)["result"]]

    assert stack.chat(stream=True).status_code == 200
    with stack.open_stream():
        pass  # leaves early
    with stack.open_stream():
        with suppress(AssertionError):
            wait_for("data in every panel", lambda: not empty())
        assert empty() == []
    for expression in files.dashboard_expressions():
        prometheus.query(expression)
