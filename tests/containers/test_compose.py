"""The compose files are started: docker/compose.yaml, and what ``init`` and ``plan -o`` write."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.containers.engine import ROOT, Podman, Project
from tests.fakes.processes import Process

pytestmark = pytest.mark.containers

INIT_IMAGE = "localhost/hetero-gateway:init"
GATEWAY, ADMIN, PROMETHEUS = (f"http://127.0.0.1:{port}" for port in (8000, 9001, 9090))
# What comes to nobody else: Docker would send SIGKILL after a service's grace, 40 s.
STOPS_WITHIN_S = 20.0


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    missing = [name for name in ("podman", "runc", "debootstrap") if shutil.which(name) is None]
    assert not missing, f"not installed: {', '.join(missing)}; see scripts/containers"
    engine = Podman()
    engine.clean()  # what a run that was killed has left
    engine.prepare()
    yield engine
    engine.clean()


@pytest.fixture(scope="module")
def image(podman: Podman) -> None:
    """The project's own image is there."""
    podman.build_ours()


@pytest.fixture
def started(podman: Podman, tmp_path: Path) -> Iterator[Callable[[Path], Project]]:
    projects = []

    def start(file: Path) -> Project:
        project = Project(podman, file, tmp_path)
        projects.append(project)
        project.up()
        return project

    yield start
    for project in projects:
        # Shown where the test has failed.
        sys.stderr.write(podman.try_run("logs", project.container("gateway")).stderr)
        project.down()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30, trust_env=False) as http:
        yield http


def eventually(check: Callable[[], Any], within_s: float = 60.0) -> Any:
    """The first true answer; what it is instead, after so long."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            found = check()
        except httpx.HTTPError as error:
            found, seen = None, repr(error)
        else:
            seen = repr(found)
        if found:
            return found
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {seen}"
        time.sleep(0.3)


def rows(
    client: httpx.Client, admin: str = ADMIN, key: str | None = None
) -> dict[str, dict[str, Any]]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    page = client.get(f"{admin}/admin/instances", headers=headers).raise_for_status().json()
    return {row["id"]: row for row in page["instances"]}


def complete(client: httpx.Client, model: str, stream: bool = False) -> str:
    """Sends a chat request; returns the instance that answered it."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": stream,
    }
    answer = client.post(f"{GATEWAY}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["usage"]["completion_tokens"] == 4
    return answer.headers["x-hetero-gateway-instance"]


def targets_up(client: httpx.Client) -> set[str] | None:
    """The addresses that Prometheus scrapes, once all of them are up."""
    document = client.get(f"{PROMETHEUS}/api/v1/targets").raise_for_status().json()
    targets = document["data"]["activeTargets"]
    healthy = bool(targets) and all(target["health"] == "up" for target in targets)
    return {target["discoveredLabels"]["__address__"] for target in targets} if healthy else None


def answers_and_is_watched(
    podman: Podman, project: Project, client: httpx.Client, model: str
) -> list[str]:
    """What every compose file of ours has to do; returns the instances."""
    eventually(lambda: client.get(f"{GATEWAY}/readyz").status_code == 200)
    eventually(lambda: all(row["up"] for row in rows(client).values()))
    instances = list(rows(client))
    used = {complete(client, model, stream=i % 2 == 1) for i in range(20)}
    assert used <= set(instances)
    assert "<title>" in client.get(f"{ADMIN}/dashboard").raise_for_status().text
    # /admin is on its own port alone.
    assert client.get(f"{GATEWAY}/admin/instances").status_code == 403
    targets = eventually(lambda: targets_up(client))
    assert len(targets) == len(instances) + 1
    query = {"query": "sum(hetero_gateway_requests_total)"}

    def counted() -> bool:
        document = client.get(f"{PROMETHEUS}/api/v1/query", params=query).json()
        result = document["data"]["result"]
        return bool(result) and float(result[0]["value"][1]) == 20

    eventually(counted)
    for service in project.services:
        podman.run("healthcheck", "run", project.container(service))
    for service in ["gateway", *instances]:
        container = project.container(service)
        assert podman.run("exec", container, "id", "-u") == "10001"
        written = podman.try_run("exec", container, "touch", "/opt/hetero-gateway/x")
        assert "Read-only file system" in written.stderr
    return instances


@pytest.mark.usefixtures("image")
def test_the_whole_picture_starts_loses_an_instance_and_stops(podman, started, client):
    project = started(ROOT / "docker" / "compose.yaml")
    instances = answers_and_is_watched(podman, project, client, "llama-3-8b")
    assert set(instances) == {"v100-tp4", "v100-tp1"}
    podman.run("kill", project.container("v100-tp1"))
    # At once: who is gone is found out by the first request, and that one goes elsewhere.
    assert {complete(client, "llama-3-8b") for _ in range(6)} == {"v100-tp4"}
    eventually(lambda: not rows(client)["v100-tp1"]["up"])
    podman.run("start", project.container("v100-tp1"))
    eventually(lambda: rows(client)["v100-tp1"]["up"])
    for service in ("gateway", "v100-tp4", "v100-tp1"):
        container = project.container(service)
        begun_s = time.monotonic()
        podman.run("stop", "--time", "40", container)
        assert time.monotonic() - begun_s < STOPS_WITHIN_S, service
        state = json.loads(podman.run("inspect", container))[0]["State"]
        assert state["ExitCode"] == 0, f"{service}: {podman.run('logs', container)[-2000:]}"


# Three cards, so at least two instances.
PLANNED = """\
model: Llama-3-8B
max_model_len: 2048
machines:
  - {id: v100-box, accelerator: V100-32GB-NVLink2, count: 3}
engine: {max_num_seqs: 16}
workload:
  prompt: {median: 200, sigma: 0.7, max: 1024}
  output: {median: 120, sigma: 0.5, max: 300}
"""


@pytest.mark.usefixtures("image")
def test_what_the_planner_writes_starts_too(podman, started, client, tmp_path):
    (tmp_path / "cluster.yaml").write_text(PLANNED, "utf-8")
    folder = tmp_path / "plan"
    subprocess.run(
        [
            *(sys.executable, "-m", "hetero_gateway", "plan", "-c", str(tmp_path / "cluster.yaml")),
            *("-o", str(folder), "--emulate", "--time-scale", "20"),
        ],
        check=True,
        capture_output=True,
        timeout=300,
    )
    project = started(folder / "compose.yaml")
    (model,) = {
        row["model"]
        for row in yaml.safe_load((folder / "gateway.yaml").read_text("utf-8"))["instances"]
    }
    instances = answers_and_is_watched(podman, project, client, model)
    assert set(instances) == set(project.services) - {"gateway", "prometheus"}


@pytest.fixture
def servers() -> Iterator[list[str]]:
    """Two emulated instances that run on this machine, outside of any container."""
    processes = [
        Process(
            *("emulate", "--profile", f"V100-32GB-NVLink2/Llama-3-8B/tp{size}"),
            *("--model", "llama-3-8b", "--port", "0", "--time-scale", "20"),
        )
        for size in (4, 1)
    ]
    yield [process.wait_ready() for process in processes]
    for process in processes:
        process.stop()


def test_what_init_writes_starts_in_front_of_servers_on_the_host(
    podman, started, client, servers, tmp_path, monkeypatch
):
    folder = tmp_path / "my-gateway"
    command = [sys.executable, "-m", "hetero_gateway", "init", "--probe", *servers]
    subprocess.run([*command, "-o", str(folder)], check=True, capture_output=True, timeout=120)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    command += ["-d", str(folder / "wheels")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    podman.build(folder / "Dockerfile", folder, INIT_IMAGE)
    monkeypatch.setitem(podman.environment, "HETERO_GATEWAY_IMAGE", INIT_IMAGE)
    project = started(folder / "compose.yaml")
    assert set(project.services) == {"gateway", "prometheus"}  # and Grafana, which is left out
    eventually(lambda: client.get(f"{GATEWAY}/readyz").status_code == 200)
    assert client.get(f"{GATEWAY}/admin/instances").status_code == 401
    # As compose.yaml says: the key that the gateway made at its start.
    gateway = project.container("gateway")
    key = podman.run("exec", gateway, "hetero-gateway", "key", "admin", GATEWAY).strip()
    assert all(row["up"] for row in rows(client, GATEWAY, key).values())
    used = {complete(client, "llama-3-8b", stream=i % 2 == 1) for i in range(8)}
    assert used <= set(rows(client, GATEWAY, key))
    assert "<title>" in client.get(f"{GATEWAY}/dashboard").raise_for_status().text
    targets = eventually(lambda: targets_up(client))
    assert len(targets) == len(servers) + 1
    podman.run("healthcheck", "run", gateway)
    podman.run("healthcheck", "run", project.container("prometheus"))
    assert podman.run("exec", gateway, "id", "-u") == "10001"
    written = podman.try_run("exec", gateway, "touch", "/opt/hetero-gateway/x")
    assert "Read-only file system" in written.stderr
    podman.run("stop", "--time", "40", gateway)
    assert json.loads(podman.run("inspect", gateway))[0]["State"]["ExitCode"] == 0
