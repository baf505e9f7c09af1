"""The chart's pods are started with the image: probes, the preStop hook, SIGTERM, no rights.

Podman stands for the kubelet: what it is told here is read from the rendered manifests.
"""

import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.containers.engine import Podman
from tests.containers.test_compose import eventually, image, podman  # noqa: F401 - fixtures
from tests.docker.test_chart import container, one, rendered

pytestmark = pytest.mark.containers

NETWORK, PORT = "chart", 8000
VALUES: dict[str, Any] = {
    "image": {"repository": "localhost/hetero-gateway", "tag": "local"},
    "preStopSeconds": 2,
    "emulated": [{"name": "fast", "profile": "V100-32GB-NVLink2/Llama-3-8B/tp4"}],
}


class Pod:
    """A pod's one container, as its template says."""

    def __init__(
        self, engine: Podman, name: str, documents: list[dict[str, Any]], template: dict[str, Any]
    ) -> None:
        self._engine, self._name = engine, name
        spec = template["spec"]
        (self.container,) = spec["containers"]
        security = spec["securityContext"] | self.container["securityContext"]
        assert security["runAsNonRoot"]
        assert not security["allowPrivilegeEscalation"]
        self.user = security["runAsUser"]
        self.options = [
            *("--user", f"{self.user}:{security['runAsGroup']}"),
            *("--security-opt", "no-new-privileges"),
            *("--read-only", "--read-only-tmpfs=false"),
            *(f"--cap-drop={each}" for each in security["capabilities"]["drop"]),
        ]
        assert security["readOnlyRootFilesystem"]
        for each in self.container.get("env", ()):
            reference = each["valueFrom"]["secretKeyRef"]
            data = one(documents, "Secret", reference["name"])["data"]
            self.options += ["--env", f"{each['name']}={_decoded(data[reference['key']])}"]

    def mount(self, documents: list[dict[str, Any]], folder: Path, volumes: Any) -> None:
        by_name = {volume["name"]: volume for volume in volumes}
        for mounted in self.container["volumeMounts"]:
            volume, path = by_name[mounted["name"]], mounted["mountPath"]
            if "emptyDir" in volume:
                self.options += ["--tmpfs", f"{path}:mode=1777"]
                continue
            data = one(documents, "ConfigMap", volume["configMap"]["name"])["data"]
            place = folder / mounted["name"]
            place.mkdir()
            for name, text in data.items():
                (place / name).write_text(text, "utf-8")
            self.options += ["--volume", f"{place}:{path}:ro"]

    def start(self, *options: str) -> None:
        words = ("run", "--detach", "--name", self._name, "--network", NETWORK)
        limits = [f"--ulimit={name}={most}:{most}" for name, most in self._engine.limits.items()]
        spec = self.container
        self._engine.run(*words, *limits, *self.options, *options, spec["image"], *spec["args"])

    def stop(self, grace_s: float) -> int:
        """As the kubelet does: the hook, SIGTERM, and SIGKILL after the grace. Its exit code."""
        begun_s = time.monotonic()
        self._engine.run(
            "exec", self._name, *self.container["lifecycle"]["preStop"]["exec"]["command"]
        )
        self._engine.run("kill", "--signal", "TERM", self._name)
        left_s = grace_s - (time.monotonic() - begun_s)
        return int(self._engine.run("wait", self._name, within_s=left_s))

    def logs(self) -> str:
        return self._engine.try_run("logs", self._name).stderr


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()


@pytest.fixture
def network(podman: Podman) -> Iterator[None]:  # noqa: F811 - the fixture
    podman.try_run("network", "create", NETWORK)
    yield
    podman.clean()


@pytest.mark.usefixtures("image", "network")
def test_a_pod_of_the_chart_serves_unprivileged_and_ends_with_its_streams(
    podman: Podman,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    documents = rendered(VALUES)
    stateful = one(documents, "StatefulSet", "gateway-fast")["spec"]
    engine = Pod(podman, "gateway-fast-0", documents, stateful["template"])
    # The name that a headless Service gives it.
    engine.start("--network-alias", "gateway-fast-0.gateway-fast")
    template = one(documents, "Deployment")["spec"]["template"]
    pod = Pod(podman, "gateway", documents, template)
    pod.mount(documents, tmp_path, template["spec"]["volumes"])
    pod.start("--publish", f"127.0.0.1:{PORT}:{PORT}")
    key = _decoded(one(documents, "Secret", "gateway-keys")["data"]["gateway-api-key"])
    bearer = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60, trust_env=False) as client:
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = container(documents)[name]["httpGet"]["path"]
            eventually(lambda path=path: client.get(path).status_code == 200)  # type: ignore[misc]
        assert podman.run("exec", "gateway", "id", "-u") == str(pod.user)
        written = podman.try_run("exec", "gateway", "touch", "/opt/hetero-gateway/x")
        assert "Read-only file system" in written.stderr
        rights = podman.run("exec", "gateway", "grep", "CapEff", "/proc/1/status")
        assert int(rights.split()[1], 16) == 0
        message = {"role": "user", "content": "Hello"}
        body = {"model": "Llama-3-8B", "messages": [message], "max_tokens": 4}
        path = "/v1/chat/completions"
        assert client.post(path, json=body).status_code == 401
        assert client.post(path, json=body, headers=bearer).status_code == 200
        # A stream of some seconds, longer than the hook.
        body |= {"max_tokens": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", path, json=body, headers=bearer) as answer:
            lines = answer.iter_lines()
            assert "chat.completion.chunk" in next(lines)
            ended: list[int] = []
            grace_s = template["spec"]["terminationGracePeriodSeconds"]
            stopping = threading.Thread(target=lambda: ended.append(pod.stop(grace_s)))
            stopping.start()
            # During the hook it serves on, new connections included.
            assert httpx.get(f"http://127.0.0.1:{PORT}/readyz").status_code == 200
            assert [line for line in lines if line][-1] == "data: [DONE]"
        stopping.join()
    assert ended == [0], pod.logs()
    state = json.loads(podman.run("inspect", "gateway"))[0]["State"]
    assert not state["OOMKilled"]
