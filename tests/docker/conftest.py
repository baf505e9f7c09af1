"""The container files, read and resolved as Docker would read them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILES = ("compose.yaml", "compose.vllm.yaml")


class ContainerFiles:
    """The files under docker/, parsed."""

    root = ROOT
    docker = ROOT / "docker"
    monitoring = ROOT / "src" / "hetero_gateway" / "deploy" / "monitoring"
    compose_names = COMPOSE_FILES

    def dockerfile(self) -> list[tuple[str, str]]:
        """Every instruction of the Dockerfile with its value, comments left out."""
        parser = DockerfileParser(str(self.docker / "Dockerfile"))
        return [
            (line["instruction"], re.sub(r"\s+", " ", line["value"]))
            for line in parser.structure
            if line["instruction"] != "COMMENT"
        ]

    def last(self, instruction: str) -> str:
        """The value that holds in the final image."""
        return [value for name, value in self.dockerfile() if name == instruction][-1]

    def compose(self, name: str) -> dict[str, Any]:
        """A compose file with variables at their defaults and every ``extends`` resolved.

        One that has to be set is "secret".
        """
        text = (self.docker / name).read_text(encoding="utf-8")
        text = re.sub(r"\$\{\w+:\?[^}]*\}", "secret", text)
        data: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
        assert "${" not in yaml.safe_dump(data), "a variable without a default"
        for service_name, service in data["services"].items():
            if extends := service.pop("extends", None):
                base = self.compose(extends["file"])["services"][extends["service"]]
                # Mounts are merged by target, as Compose does; nothing else here needs merging.
                mounts = {mount.split(":")[1]: mount for mount in base.get("volumes", ())}
                mounts |= {mount.split(":")[1]: mount for mount in service.get("volumes", ())}
                data["services"][service_name] = base | service | {"volumes": list(mounts.values())}
        return data

    def mounts(self, service: dict[str, Any]) -> dict[str, Path]:
        """Container path to host path of every file or directory that a service mounts."""
        return {
            mount.split(":")[1]: (self.docker / mount.split(":")[0]).resolve()
            for mount in service.get("volumes", ())
            if mount.startswith(".")
        }

    def dashboard(self) -> dict[str, Any]:
        path = self.monitoring / "grafana" / "dashboards" / "hetero-gateway.json"
        data: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return data

    def panels(self) -> list[dict[str, Any]]:
        return [panel for panel in self.dashboard()["panels"] if panel["type"] != "row"]

    def dashboard_expressions(self) -> list[str]:
        """Every query of the dashboard, with Grafana's variables as Grafana would fill them in."""
        values = {"$__rate_interval": "20s", "$model": ".*", "$backend": ".*", "$gateway": ".*"}
        expressions = []
        for panel in self.panels():
            for target in panel["targets"]:
                expression = target["expr"]
                for variable, value in values.items():
                    expression = expression.replace(variable, value)
                assert "$" not in expression, f"{panel['title']}: unknown variable: {expression}"
                expressions.append(expression)
        return expressions

    def gateway_config(self, compose_name: str) -> Path:
        service = self.compose(compose_name)["services"]["gateway"]
        return self.mounts(service)["/etc/hetero-gateway/gateway.yaml"]


@pytest.fixture(scope="session")
def files() -> ContainerFiles:
    return ContainerFiles()


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compose.vllm.yaml passes it on."""
    monkeypatch.setenv("HETERO_GATEWAY_ADMIN_KEY", "secret")


@pytest.fixture(params=COMPOSE_FILES)
def compose_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def metrics() -> dict[str, tuple[str, set[str]]]:
    """The gateway's metrics: name to kind and labels. What docs and dashboards may rely on."""
    listed: dict[str, tuple[str, str]] = {
        "requests_total": ("counter", "model backend outcome"),
        "request_duration_seconds": ("histogram", "model backend"),
        "time_to_first_token_seconds": ("histogram", "model backend"),
        "time_per_output_token_seconds": ("histogram", "model backend"),
        "input_tokens_total": ("counter", "model backend"),
        "output_tokens_total": ("counter", "model backend"),
        "in_flight_requests": ("gauge", "backend"),
        "instance_workload": ("gauge", "backend"),
        "instance_kv_usage_ratio": ("gauge", "backend source"),
        "instance_up": ("gauge", "backend"),
        "instance_ejected": ("gauge", "backend"),
        "instance_refused_pairs": ("gauge", "backend"),
        "instance_problem": ("gauge", "backend problem"),
        "instance_ejections_total": ("counter", "backend reason"),
        "routing_decisions_total": ("counter", "policy backend"),
        "scheduler_decision_seconds": ("histogram", ""),
        "prediction_error": ("histogram", "quantity"),
        "retries_total": ("counter", "reason"),
        "upstream_errors_total": ("counter", "backend reason"),
        "client_disconnects_total": ("counter", "backend"),
        "overhead_seconds": ("histogram", ""),
        "queue_depth": ("gauge", ""),
        "predictor_failures_total": ("counter", "reason"),
        "queue_wait_seconds": ("histogram", ""),
        "queue_rejections_total": ("counter", "reason"),
        "instance_speed_factor": ("gauge", "backend"),
        "instance_waiting_first_token": ("gauge", "backend"),
        "profile_drift_ratio": ("gauge", "backend phase"),
        "profile_age_seconds": ("gauge", "backend"),
        "build_info": ("gauge", "version"),
        "event_loop_tasks": ("gauge", ""),
        "client_connections": ("gauge", ""),
        "client_timeouts_total": ("counter", "phase"),
        "client_refusals_total": ("counter", "status"),
        "responses_total": ("counter", "status"),
        "class_requests_total": ("counter", "class outcome"),
    }
    return {
        f"hetero_gateway_{n}": (kind, set(labels.split())) for n, (kind, labels) in listed.items()
    }
