"""Manifests whose numbers follow the load: each set is asked for once, nothing is cut."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml

from benchmarks.ports import free_port
from hetero_gateway.deploy.directory import render_deployment
from hetero_gateway.deploy.kubernetes import DRAIN_S
from hetero_gateway.files.following_config import followed_profiles
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.yaml_file import parse_model
from tests.deploy import plans
from tests.deploy.plans import ONE_MACHINE, options, plan
from tests.fakes.kubernetes import FakeApiServer, pod
from tests.fakes.processes import until
from tests.fakes.vllm import fake_instances

FOLDER = "kubernetes/following/"
SAME_TYPE_TWICE = plan(
    {
        "a": ("V100-32GB-NVLink2", 8, (4, 2, 2)),
        "b": ("V100-32GB-NVLink2", 4, (2, 2)),
        "c": ("V100-32GB-NVLink2", 8, (2, 2, 2)),
    }
)
PLANS = [*plans.PLANS, SAME_TYPE_TWICE]


class Files:
    def __init__(self, planned, **changes) -> None:
        self.texts = {
            name.removeprefix(FOLDER): text
            for name, text in render_deployment(planned, options(**changes)).items()
            if name.startswith(FOLDER)
        }
        self.documents = {n: list(yaml.safe_load_all(t)) for n, t in self.texts.items()}

    def of(self, kind: str) -> dict[str, dict]:
        return {
            d["metadata"]["name"]: d
            for each in self.documents.values()
            for d in each
            if d.get("kind") == kind
        }

    def configuration(self) -> dict:
        return yaml.safe_load(self.of("ConfigMap")["hetero-gateway"]["data"]["gateway.yaml"])

    def queries(self) -> dict[str, str]:
        """By StatefulSet."""
        return {
            name: each["spec"]["triggers"][0]["metadata"]["query"]
            for name, each in self.of("ScaledObject").items()
        }


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("planned", PLANS)
def test_every_stateful_set_has_one_of_each_autoscaler_and_no_number_of_its_own(planned, emulate):
    files = Files(planned, emulate=emulate)
    sets = files.of("StatefulSet")
    assert sets
    for kind in ("ScaledObject", "HorizontalPodAutoscaler"):
        scalers = files.of(kind)
        assert scalers.keys() == sets.keys()
        for name, each in scalers.items():
            target = each["spec"]["scaleTargetRef"]
            assert target == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}
    assert not any("replicas" in each["spec"] for each in sets.values())
    # Only one of the two is applied with the rest.
    assert {n for n in files.texts if "/" not in n} == {"gateway.yaml", "instances.yaml"}


@pytest.mark.parametrize("planned", PLANS)
def test_keda_and_the_hpa_ask_the_same(planned):
    files = Files(planned)
    (values,) = files.documents["hpa/prometheus-adapter.yaml"]
    rules = {rule["name"]["as"]: rule["metricsQuery"] for rule in values["rules"]["external"]}
    for name, each in files.of("HorizontalPodAutoscaler").items():
        (metric,) = each["spec"]["metrics"]
        assert rules[metric["external"]["metric"]["name"]] == files.queries()[name]
        assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
        scaled = files.of("ScaledObject")[name]["spec"]
        assert each["spec"]["maxReplicas"] == scaled["maxReplicaCount"]
        assert scaled["triggers"][0]["metadata"]["threshold"] == "1"


def replicas(query: str, desired: dict[tuple[str, str], int]) -> int:
    """The query's value, as Prometheus has it."""
    match = re.fullmatch(
        r"clamp\(sum\(hetero_gateway_desired_instances"
        r'\{model="llama-3-8b",accelerator="(.+)",tensor_parallel="(\d+)"\}\)'
        r"(?: - (\d+))?, 0, (\d+)\)",
        query,
    )
    assert match
    accelerator, t, others, most = match.groups()
    return max(0, min(desired[accelerator, t] - int(others or 0), int(most)))


@pytest.mark.parametrize("planned", PLANS)
def test_the_sets_of_a_type_add_up_to_what_is_desired(planned):
    files = Files(planned)
    data = files.of("ConfigMap")["hetero-gateway"]["data"]
    types = files.configuration()["following"]["types"]
    profiles = [yaml.safe_load(data[each["profile"].replace("/", ".")]) for each in types]
    keys = [(p["gpu"], str(p["tensor_parallel"])) for p in profiles]
    for share in (0, 0.3, 0.5, 1):
        desired = {key: round(share * t["max"]) for key, t in zip(keys, types, strict=True)}
        found = sum(replicas(query, desired) for query in files.queries().values())
        assert found == sum(desired.values())


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("planned", PLANS)
def test_the_gateways_configuration_is_one_and_finds_every_pod(planned, emulate, tmp_path):
    files = Files(planned, emulate=emulate, ttft_p99_s=2.0)
    data = files.of("ConfigMap")["hetero-gateway"]["data"]
    config = parse_model(GatewayConfig, files.configuration(), "gateway.yaml")
    for key, text in data.items():
        path = tmp_path / key.replace("profiles.", "profiles/", 1)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert len(followed_profiles(config.following, tmp_path)) == len(config.following.types)
    assert config.following.ttft_p99_s == 2
    assert sum(each.min for each in config.following.types) == 1
    (source,) = config.discovery
    names = re.fullmatch(r"app.kubernetes.io/name in \((.*)\)", source.selector or "")
    assert names
    assert set(names[1].split(",")) == files.of("StatefulSet").keys()
    for rule in source.profiles:
        (name,) = rule.labels.values()
        pod = files.of("StatefulSet")[name]["spec"]["template"]["metadata"]["labels"]
        assert rule.labels.items() <= pod.items()
    pod = files.of("Deployment")["hetero-gateway"]["spec"]["template"]["spec"]
    account = files.of("ServiceAccount")[pod["serviceAccountName"]]["metadata"]["name"]
    (subject,) = files.of("RoleBinding")["hetero-gateway"]["subjects"]
    assert subject["name"] == account
    (rule,) = files.of("Role")["hetero-gateway"]["rules"]
    assert {"list", "watch"} <= set(rule["verbs"])
    assert pod["automountServiceAccountToken"]


def test_a_pod_has_the_time_that_its_drain_may_take():
    for each in Files(ONE_MACHINE, shutdown_timeout_s=30).of("StatefulSet").values():
        pod = each["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > DRAIN_S + 30
        assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][0] == "python3"


@pytest.mark.slow
@pytest.mark.parametrize("left", ["running", "waiting"])
def test_the_drain_script_waits_until_the_engine_has_nothing_left(left):
    """Against a server of vLLM's series; the script is the pod's, but for port and pause."""
    each = next(iter(Files(ONE_MACHINE).of("StatefulSet").values()))
    container = each["spec"]["template"]["spec"]["containers"][0]
    program, flag, script = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, flag) == ("python3", "-c")
    busy = [2.0]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        other = "waiting" if left == "running" else "running"
        labels = 'engine="0",model_name="m{x}"'
        body = f"vllm:num_requests_{other}{{{labels}}} 0.0\n"
        body += f"vllm:num_requests_{left}{{{labels}}} {sum(busy)}\n"
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()
        writer.close()

    async def drain() -> tuple[bool, int]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        text = script.replace(":8000/", f":{port}/").replace("sleep(5)", "sleep(0)")
        process = await asyncio.create_subprocess_exec(sys.executable, flag, text)
        waited = False
        try:
            await asyncio.wait_for(process.wait(), 3)
        except TimeoutError:
            waited = True
        busy.clear()
        code = await asyncio.wait_for(process.wait(), 30)
        server.close()
        return waited, code

    assert asyncio.run(drain()) == (True, 0)


def test_the_drain_script_ends_where_no_engine_answers():
    each = next(iter(Files(ONE_MACHINE).of("StatefulSet").values()))
    container = each["spec"]["template"]["spec"]["containers"][0]
    *_, script = container["lifecycle"]["preStop"]["exec"]["command"]
    text = script.replace(":8000/", ":1/").replace("sleep(5)", "sleep(0)")
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", text], env=os.environ, timeout=60, check=False)
    assert done.returncode == 0
    assert time.monotonic() - began_s < DRAIN_S


@pytest.mark.system
def test_prometheus_answers_the_manifests_query_with_what_a_gateway_desires(tmp_path):
    """The gateway of the manifests, its pods at a fake API server, and a real Prometheus.

    Then a pod is to go while it streams: it gets nothing new, and its stream ends whole.
    """
    asyncio.run(_followed(tmp_path))


async def _followed(folder: Path) -> None:
    planned = plan({"box": ("V100-32GB-NVLink2", 4, (1, 1, 1))})
    files = Files(planned, emulate=True)
    (name,) = files.of("StatefulSet")
    async with contextlib.AsyncExitStack() as stack:
        fakes = await stack.enter_async_context(fake_instances(1, models=("llama-3-8b",)))
        api = await stack.enter_async_context(FakeApiServer())
        labels = {"app.kubernetes.io/name": name}
        api.put(pod(f"{name}-0", "127.0.0.1", **labels))
        port, prometheus_port = free_port(), free_port()
        config = files.configuration()
        (source,) = config["discovery"]
        source |= {"api_url": api.url, "namespace": "models", "port": fakes[0].port}
        config["server"] = {"host": "127.0.0.1", "port": port}
        config["following"]["interval_s"] = 10
        config["following"]["types"][0]["min"] = 2  # so that it is not what is there
        (folder / "profiles").mkdir()
        for key, text in files.of("ConfigMap")["hetero-gateway"]["data"].items():
            if key != "gateway.yaml":
                (folder / key.replace("profiles.", "profiles/", 1)).write_text(text)
        (folder / "gateway.yaml").write_text(yaml.safe_dump(config))
        job = {"job_name": "gateway", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        (folder / "prometheus.yml").write_text(
            yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]})
        )
        serve = [sys.executable, "-m", "hetero_gateway", "serve", "-c", f"{folder}/gateway.yaml"]
        for words in (
            serve,
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{prometheus_port}",
            ],
        ):
            await stack.enter_async_context(_process(words))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
        gateway = f"http://127.0.0.1:{port}"
        query = {"query": files.queries()[name]}

        async def value() -> float | None:
            url = f"http://127.0.0.1:{prometheus_port}/api/v1/query"
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get(url, params=query)
                # 503 until it has read what it kept: it listens before it is ready.
                rows = answer.json()["data"]["result"] if answer.status_code == 200 else ()
                for row in rows:
                    return float(row["value"][1])
            return None

        await until(value, within_s=120)
        assert await value() == 2
        (row,) = (await client.get(f"{gateway}/admin/following")).json()["models"]
        assert [each["desired"] for each in row["types"]] == [2]

        body = {"model": "llama-3-8b", "messages": [{"role": "user", "content": "hello"}]}
        slow = {"stream": True, "fake": {"events": 30, "delay_s": 0.1}}
        streamed = asyncio.create_task(
            client.post(f"{gateway}/v1/chat/completions", json=body | slow)
        )

        await until(lambda: fakes[0].open > 0)
        leaving = pod(f"{name}-0", "127.0.0.1", **labels)
        leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        api.put(leaving)

        async def refused() -> bool:
            answer = await client.post(f"{gateway}/v1/chat/completions", json=body)
            return answer.status_code in (404, 503)

        await until(refused)
        assert not streamed.done()
        text = (await streamed).text
        assert text.rstrip().endswith("data: [DONE]")
        assert text.count("data: ") > 30


@contextlib.asynccontextmanager
async def _process(words: list[str]) -> AsyncIterator[None]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = await asyncio.create_subprocess_exec(
        *words, env=environment, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
