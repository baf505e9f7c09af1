"""What the container files promise, checked without a Docker engine."""

import fnmatch
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.profile_file import builtin_profiles
from tests.fakes import schemas
from tests.fakes.wheels import build, copied_into_the_build, copy_context

VERSION_TAG = re.compile(r"v?\d+\.\d+\.\d+(-[a-z0-9.-]+)?")


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def emulated(services: dict[str, Any]) -> dict[str, list[str]]:
    return {n: s["command"] for n, s in services.items() if s.get("command", [""])[0] == "emulate"}


def vllm(services: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {n: s for n, s in services.items() if s.get("entrypoint") == ["vllm", "serve"]}


# --- compose ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_compose_files_match_the_compose_specification(files):
    code, said = schemas.check(
        "compose-spec", *(files.docker / name for name in files.compose_names)
    )
    assert code == 0, said


@pytest.mark.slow
def test_a_misspelt_compose_key_does_not_match(files, tmp_path):
    data = files.compose("compose.yaml")
    data["services"]["gateway"]["port"] = data["services"]["gateway"].pop("ports")
    (tmp_path / "compose.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    code, said = schemas.check("compose-spec", tmp_path / "compose.yaml")
    assert code == 1
    assert "'port' was unexpected" in said


def test_every_pulled_image_is_pinned_to_a_version(files, compose_name):
    for name, service in files.compose(compose_name)["services"].items():
        if "build" not in service:
            image, _, tag = service["image"].rpartition(":")
            assert image, f"{name}: no tag"
            assert VERSION_TAG.fullmatch(tag), f"{name}: {tag}"


def test_ports_are_published_on_loopback_only(files, compose_name):
    published = [
        port
        for service in files.compose(compose_name)["services"].values()
        for port in service.get("ports", ())
    ]
    assert "127.0.0.1:8000:8000" in published
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):(\d+)", port) for port in published)
    assert len(set(published)) == len(published)


def test_every_mounted_file_exists_and_every_volume_is_declared(files, compose_name):
    data = files.compose(compose_name)
    for name, service in data["services"].items():
        for mount in service.get("volumes", ()):
            source, _, rest = mount.partition(":")
            if source.startswith("."):
                assert (files.docker / source).exists(), f"{name}: {source}"
                assert rest.endswith(":ro"), f"{name}: {source} is writable"
            else:
                assert source in data["volumes"], f"{name}: {source}"


def test_a_service_that_is_built_names_an_existing_dockerfile(files, compose_name):
    built = [s for s in files.compose(compose_name)["services"].values() if "build" in s]
    assert built
    for service in built:
        context = (files.docker / service["build"]["context"]).resolve()
        assert context == files.root
        assert (context / service["build"]["dockerfile"]).is_file()
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True


def test_every_service_has_a_health_check(files, compose_name):
    for name, service in files.compose(compose_name)["services"].items():
        if name == "gateway":  # the image's own
            assert "healthcheck" not in service
        else:
            assert service["healthcheck"]["test"][0] == "CMD", name


# --- Dockerfile ------------------------------------------------------------------------------


def test_the_image_ends_as_a_numeric_user_that_is_not_root(files):
    instructions = files.dockerfile()
    final_stage = instructions[max(i for i, (n, _) in enumerate(instructions) if n == "FROM") :]
    users = [value for name, value in final_stage if name == "USER"]
    assert len(users) == 1
    uid, _, gid = users[0].partition(":")
    assert int(uid) > 0
    assert int(gid) > 0
    after = final_stage[final_stage.index(("USER", users[0])) :]
    assert not [name for name, _ in after if name in ("RUN", "COPY", "ADD")]


def test_the_image_is_built_in_two_stages_from_one_pinned_image(files):
    instructions = files.dockerfile()
    name, _, default = next(v for n, v in instructions if n == "ARG").partition("=")
    assert VERSION_TAG.fullmatch(default.rpartition(":")[2]), default
    stages = [value for n, value in instructions if n == "FROM"]
    assert stages == [f"${{{name}}} AS build", f"${{{name}}}"]
    final_stage = instructions[instructions.index(("FROM", stages[1])) :]
    assert not [v for n, v in final_stage if n == "RUN" and re.search(r"\b(pip|apt-get|gcc)\b", v)]


def test_the_wheel_of_the_image_is_compiled(files):
    """tests/test_compiled.py builds one so, of the same files."""
    commands = [value for name, value in files.dockerfile() if name == "RUN"]
    assert any(re.search(r"apt-get install .*\bgcc libc6-dev\b", command) for command in commands)
    (install,) = (command for command in commands if "requirements/build.txt" in command)
    assert "-r requirements/compile.txt" in install
    (build,) = (command for command in commands if "pip wheel" in command)
    assert build.startswith("HATCH_BUILD_HOOKS_ENABLE=1 pip wheel")


def test_the_image_runs_serve_and_checks_liveness(files):
    assert json.loads(files.last("ENTRYPOINT")) == ["hetero-gateway"]
    assert json.loads(files.last("CMD")) == [
        *("serve", "-c", "/etc/hetero-gateway/gateway.yaml", "--host", "0.0.0.0")
    ]
    options, _, command = files.last("HEALTHCHECK").partition("CMD ")
    assert {o.split("=")[0] for o in options.split()} == {
        *("--interval", "--timeout", "--start-period", "--retries")
    }
    assert "/livez" in json.loads(command)[-1]
    assert "curl" not in command


def test_what_the_build_copies_exists_and_is_not_ignored(files):
    lines = (files.docker / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "a list of what goes in"
    kept = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = copied_into_the_build()
    assert copied == kept
    for source in copied:
        assert (files.root / source).exists(), source
    dropped = [rule for rule in rules if not rule.startswith("!")][1:]
    assert any(fnmatch.fnmatch("src/hetero_gateway/__pycache__", rule) for rule in dropped)


def test_the_wheel_holds_the_package_when_built_from_what_the_build_may_see(tmp_path):
    context = copy_context(tmp_path / "context")
    wheel = build(tmp_path / "dist", context)
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        (entry_points,) = (n for n in packed if n.endswith("entry_points.txt"))
        assert b"hetero-gateway = hetero_gateway.cli:main" in archive.read(entry_points)
    source = context / "src"
    ours = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert "hetero_gateway/files/instance_profiles.csv" in ours
    assert ours <= packed


# --- what belongs together -------------------------------------------------------------------


def test_a_gateway_configuration_loads(files, compose_name):
    path = files.gateway_config(compose_name)
    config = load_gateway_config(path)
    assert len(config.instances) == 2
    assert config.server.host == "0.0.0.0"
    assert config.server.port == 8000
    profiles = builtin_profiles()
    assert all(instance.profile in profiles for instance in config.instances)
    times = {profiles[i.profile].constants for i in config.instances if i.profile}
    assert len(times) == 2, "the instances are meant to be unequal"


def test_instances_are_services_and_prometheus_scrapes_them_under_their_ids(files, compose_name):
    services = files.compose(compose_name)["services"]
    config = load_gateway_config(files.gateway_config(compose_name))
    targets = yaml.safe_load(
        files.mounts(services["prometheus"])["/etc/prometheus/instances.yml"].read_text("utf-8")
    )
    assert {(t["labels"]["backend"], *t["targets"]) for t in targets} == {
        (instance.id, instance.base_url.removeprefix("http://")) for instance in config.instances
    }
    for instance in config.instances:
        assert instance.base_url == f"http://{instance.id}:8000"
        assert option(services[instance.id]["command"], "--port") == "8000"
        assert option(services[instance.id]["command"], "--host") == "0.0.0.0"


def test_an_emulated_instance_has_the_profile_and_model_that_the_gateway_expects(files):
    services = files.compose("compose.yaml")["services"]
    config = load_gateway_config(files.gateway_config("compose.yaml"))
    commands = emulated(services)
    assert set(commands) == {instance.id for instance in config.instances}
    for instance in config.instances:
        assert option(commands[instance.id], "--profile") == instance.profile
        assert option(commands[instance.id], "--model") == instance.model


def test_a_vllm_server_has_the_gpus_that_its_profile_says(files):
    servers = vllm(files.compose("compose.vllm.yaml")["services"])
    config = load_gateway_config(files.gateway_config("compose.vllm.yaml"))
    assert set(servers) == {instance.id for instance in config.instances}
    used: list[str] = []
    for instance in config.instances:
        server = servers[instance.id]
        (device,) = server["deploy"]["resources"]["reservations"]["devices"]
        used += device["device_ids"]
        size = int(option(server["command"], "--tensor-parallel-size"))
        assert size == len(device["device_ids"])
        assert instance.profile is not None
        assert size == builtin_profiles()[instance.profile].tensor_parallel
    assert len(set(used)) == len(used), "two servers on one GPU"


def test_docker_waits_longer_than_open_requests_may_take(files, compose_name):
    services = files.compose(compose_name)["services"]
    config = load_gateway_config(files.gateway_config(compose_name))
    assert seconds(services["gateway"]["stop_grace_period"]) > config.server.shutdown_timeout_s
    for server in vllm(services).values():
        drain_s = float(option(server["command"], "--shutdown-timeout"))
        assert seconds(server["stop_grace_period"]) > drain_s


def test_the_gateway_leaves_the_reserved_labels_to_prometheus(files):
    path: Path = files.monitoring / "prometheus" / "prometheus.yml"
    jobs = {j["job_name"]: j for j in yaml.safe_load(path.read_text("utf-8"))["scrape_configs"]}
    # With honor_labels the series of two gateways could overwrite each other.
    assert not any(job.get("honor_labels") for job in jobs.values())
    assert jobs["hetero-gateway"]["static_configs"] == [{"targets": ["gateway:8000"]}]


def test_grafana_finds_its_data_source_and_dashboards(files):
    grafana = files.compose("compose.yaml")["services"]["grafana"]
    mounts = files.mounts(grafana)
    provisioning = mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load(
        (provisioning / "datasources" / "prometheus.yaml").read_text("utf-8")
    )["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load(
        (provisioning / "dashboards" / "hetero-gateway.yaml").read_text("utf-8")
    )["providers"]
    dashboards = mounts[provider["options"]["path"]]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    dashboard = json.loads((dashboards / home.name).read_text("utf-8"))
    (variable,) = [v for v in dashboard["templating"]["list"] if v["type"] == "datasource"]
    assert variable["current"]["value"] == source["uid"]
    assert variable["query"] == source["type"]


def test_grafana_is_open_for_reading_and_has_no_account(files):
    environment = files.compose("compose.yaml")["services"]["grafana"]["environment"]
    assert environment.items() >= {
        ("GF_AUTH_ANONYMOUS_ENABLED", "true"),
        ("GF_AUTH_DISABLE_LOGIN_FORM", "true"),
        ("GF_AUTH_ANONYMOUS_ORG_ROLE", "Viewer"),
        ("GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION", "true"),
    }
