"""What is written: complete or not at all, the same every time, and accepted by who reads it."""

import dataclasses
import datetime
import json
import os

import pytest
import yaml

from hetero_gateway.cli import main
from hetero_gateway.deploy.directory import render_deployment, write_deployment
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.profile_file import load_profile
from tests.deploy.plans import (
    EACH_PLAN,
    EVERY_VENDOR,
    ONE_MACHINE,
    PLANS,
    SPLITTING,
    TWO_MACHINES,
    options,
    plan,
)
from tests.fakes import schemas


def texts(directory) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text("utf-8")
        for path in directory.rglob("*")
        if path.is_file()
    }


@EACH_PLAN
def test_the_written_gateway_configurations_are_valid(planned, emulate, tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_GATEWAY_ADMIN_KEY", "secret")  # as compose.yaml passes it on
    wanted = options(emulate=emulate, time_scale=3.0, priors=(300.5, 120.25))
    write_deployment(planned, wanted, tmp_path / "plan")
    for name in ("gateway.yaml", "gateway.compose.yaml"):
        assert main(["validate", "-c", str(tmp_path / "plan" / name)]) == 0
        config = load_gateway_config(tmp_path / "plan" / name)
        assert len(config.instances) == sum(map(len, planned.best.layouts.values()))
        assert config.scheduler.policy == planned.policy
        assert config.scheduler.predictor.mean_tokens == pytest.approx(120.25, abs=0.1)
    assert load_gateway_config(tmp_path / "plan" / "gateway.yaml").server.host == "127.0.0.1"


def test_requests_are_split_on_bare_machines_where_the_plan_says_that_it_pays(tmp_path):
    wanted = options(slo={"ttft_s": 2.0, "tpot_s": None})
    write_deployment(SPLITTING, wanted, tmp_path / "plan")
    config = load_gateway_config(tmp_path / "plan" / "gateway.yaml")
    assert config.scheduler.split_requests == "roles"
    assert config.scheduler.slo.ttft_s == 2
    assert config.scheduler.queue.shed_by_slo is False
    told = [(i.id, i.kv_transfer and i.kv_transfer.group) for i in config.instances]
    assert told == [
        ("box-tp4-0", None), ("box-tp1-0", "sm7-tp1"), ("box-tp1-1", "sm7-tp1"),
        ("m10-0-0-2-tp1-0", "sm7-tp1"),
    ]  # fmt: skip
    assert config.instances[1].kv_transfer.gbit_per_s == pytest.approx(100)
    files = texts(tmp_path / "plan")
    contained = yaml.safe_load(files["gateway.compose.yaml"])
    assert "split_requests" not in contained["scheduler"]
    here, there = files["commands/box.sh"], files["commands/m10-0-0-2.sh"]
    assert here.count('VLLM_NIXL_SIDE_CHANNEL_HOST="${KV_HOST:?') == 2
    assert here.count("--kv-transfer-config") == 2
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=5616 " in here
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.2 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 " in there
    assert not [n for n in files if n.endswith(".yaml") and "--kv-transfer-config" in files[n]]
    assert "pip install nixl" in files["README.md"]
    assert "nixl" not in texts_of(ONE_MACHINE)["README.md"]


def test_emulated_instances_hand_over_at_their_own_speed():
    files = texts_of(SPLITTING, emulate=True, time_scale=2.0)
    instance = yaml.safe_load(files["gateway.yaml"])["instances"][1]
    assert instance["kv_transfer"] == {
        "connector": "NixlConnector", "group": "sm7-tp1",
        "gbit_per_s": 200.0, "start_s": 0.001, "kv_bytes_per_token": 131072.0, "lease_s": 15.0,
    }  # fmt: skip
    assert files["start.sh"].count("--kv-gbit-per-s 100 --kv-start-s 0.002") == 3


def texts_of(planned, **changes) -> dict[str, str]:
    return render_deployment(planned, options(**changes))


def test_a_written_profile_is_the_planned_one(tmp_path):
    write_deployment(ONE_MACHINE, options(), tmp_path / "plan")
    config = load_gateway_config(tmp_path / "plan" / "gateway.yaml")
    for instance, size in zip(config.instances, (4, 2, 1), strict=True):
        profile = load_profile(instance.profile, tmp_path / "plan")
        assert profile == ONE_MACHINE.types["V100-32GB-NVLink2", size].profile
        assert profile.source["how"] == "derived"


def test_a_measured_profile_says_what_its_capacity_was_measured_with(tmp_path):
    key = ("V100-32GB-NVLink2", 1)
    one = plan({"box": (key[0], 1, (1,))})
    source = {
        "how": "measured", "date": datetime.date(2026, 11, 20), "quantization": "fp8",
        "gpu_memory_utilization": 0.9, "error": {"decode": 0.03}, "samples": "of no use here",
    }  # fmt: skip
    measured = dataclasses.replace(one.types[key].profile, source=source)
    for how, said in (("measured", 0.9), ("fitted", None)):
        memory = dataclasses.replace(one.types[key].memory, how=how)
        changed = dataclasses.replace(one.types[key], profile=measured, memory=memory)
        directory = tmp_path / how
        write_deployment(dataclasses.replace(one, types={key: changed}), options(), directory)
        (instance,) = load_gateway_config(directory / "gateway.yaml").instances
        written = load_profile(instance.profile, directory).source
        assert written["gpu_memory_utilization"] == said
        assert (written["quantization"], written["error"]) == ("fp8", {"decode": 0.03})


def test_the_gateway_of_faster_emulated_instances_has_their_clock(tmp_path):
    write_deployment(ONE_MACHINE, options(emulate=True, time_scale=4.0), tmp_path / "plan")
    config = load_gateway_config(tmp_path / "plan" / "gateway.yaml")
    for instance, size in zip(config.instances, (4, 2, 1), strict=True):
        real = ONE_MACHINE.types["V100-32GB-NVLink2", size].profile
        assert load_profile(instance.profile, tmp_path / "plan").constants.p8 == pytest.approx(
            real.constants.p8 / 4
        )
        own = instance.profile.replace("-scaled", "")
        assert load_profile(own, tmp_path / "plan") == real


@EACH_PLAN
def test_the_same_plan_gives_the_same_files(planned, emulate):
    first = render_deployment(planned, options(emulate=emulate))
    shuffled = dataclasses.replace(
        planned,
        candidates=(
            dataclasses.replace(
                planned.best, layouts=dict(reversed(list(planned.best.layouts.items())))
            ),
        ),
    )
    assert render_deployment(shuffled, options(emulate=emulate)) == first
    assert all(text.endswith("\n") for text in first.values())


def test_paths_are_returned_and_scripts_can_be_run(tmp_path):
    paths = write_deployment(ONE_MACHINE, options(), tmp_path / "new" / "plan")
    assert {str(p.relative_to(tmp_path / "new" / "plan")) for p in paths} == set(
        texts(tmp_path / "new" / "plan")
    )
    for path in paths:
        assert os.access(path, os.X_OK) == (path.suffix == ".sh"), path
        assert os.access(path, os.R_OK)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["plan"]


def test_several_machines_have_a_script_each_and_no_script_for_all():
    files = render_deployment(TWO_MACHINES, options())
    scripts = {name for name in files if name.endswith(".sh")}
    assert scripts == {"commands/v100-box.sh", "commands/mi-box-1.sh"}
    assert "start.sh" in render_deployment(TWO_MACHINES, options(emulate=True))
    assert "0.0.0.0" in files["commands/v100-box.sh"]
    assert "0.0.0.0" not in render_deployment(ONE_MACHINE, options())["commands/v100-box.sh"]


def test_a_single_machine_elsewhere_listens_for_the_gateway():
    files = render_deployment(ONE_MACHINE, options(addresses={"v100-box": "10.0.0.7"}))
    assert "--host 0.0.0.0" in files["commands/v100-box.sh"]
    assert "start.sh" not in files
    services = yaml.safe_load(files["compose.yaml"])["services"]
    assert services["v100-box-tp4-0"]["ports"] == ["8001:8001"]


def test_a_directory_with_something_in_it_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty.*--force"):
        write_deployment(ONE_MACHINE, options(), tmp_path)
    assert texts(tmp_path) == {"mine.txt": "mine"}


def test_force_replaces_an_older_plan_and_keeps_what_is_not_its_own(tmp_path):
    directory = tmp_path / "plan"
    write_deployment(TWO_MACHINES, options(), directory)
    (directory / "mine.txt").write_text("mine")
    (directory / "run").mkdir()
    (directory / "run" / "x.log").write_text("a log")
    write_deployment(ONE_MACHINE, options(), directory, force=True)
    expected = render_deployment(ONE_MACHINE, options())
    assert texts(directory) == expected | {"mine.txt": "mine", "run/x.log": "a log"}
    assert os.access(directory / "start.sh", os.X_OK)


def test_force_removes_nothing_outside_of_the_directory(tmp_path):
    directory = tmp_path / "plan"
    write_deployment(ONE_MACHINE, options(), directory)
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    document = json.loads((directory / "plan.json").read_text())
    document["deployment"]["files"] += ["../outside.txt", str(outside), 3]
    (directory / "plan.json").write_text(json.dumps(document))
    write_deployment(ONE_MACHINE, options(), directory, force=True)
    assert outside.read_text() == "mine"


def test_the_document_lists_files_and_instances():
    files = render_deployment(ONE_MACHINE, options(document={"best": {"x": 1}}))
    document = json.loads(files["plan.json"])
    assert document["best"] == {"x": 1}
    assert document["deployment"]["files"] == sorted(files)
    assert [i["devices"] for i in document["deployment"]["instances"]] == [
        [0, 1, 2, 3],
        [4, 5],
        [6],
    ]


@EACH_PLAN
def test_every_file_that_the_readme_names_is_there(planned, emulate):
    files = render_deployment(planned, options(emulate=emulate))
    readme = files["README.md"]
    words = {word.lstrip("`(").rstrip("`.,;:)") for word in readme.split()}
    named = {w.removeprefix("./") for w in words if w.endswith((".sh", ".yaml")) and "…" not in w}
    assert named <= set(files)
    assert {n for n in named if n.endswith(".sh")} == {n for n in files if n.endswith(".sh")}


def test_no_secret_of_the_environment_is_written(monkeypatch):
    for name in ("HF_TOKEN", "HETERO_GATEWAY_ADMIN_KEY", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "hf_secret_value")
    for planned in PLANS:
        assert "hf_secret_value" not in "".join(render_deployment(planned, options()).values())


# --- compose ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_compose_files_match_the_compose_specification(tmp_path):
    for emulate in (False, True):
        for i, planned in enumerate(PLANS):
            write_deployment(planned, options(emulate=emulate), tmp_path / f"plan{i}{emulate}")
    code, said = schemas.check("compose-spec", *tmp_path.glob("*/compose.yaml"))
    assert code == 0, said


def compose(planned, **changes):
    files = render_deployment(planned, options(**changes))
    return yaml.safe_load(files["compose.yaml"]), files


@EACH_PLAN
def test_every_mounted_file_is_written_and_every_volume_declared(planned, emulate):
    data, files = compose(planned, emulate=emulate)
    folders = {name.rsplit("/", n)[0] for name in files for n in range(1, name.count("/") + 1)}
    for name, service in data["services"].items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("./"):
                assert source[2:] in set(files) | folders, f"{name}: {source}"
            elif not source.startswith("/"):
                assert source in data["volumes"], f"{name}: {source}"


def test_a_plan_of_one_machine_starts_whole_and_publishes_on_loopback_only():
    data, files = compose(ONE_MACHINE)
    services = data["services"]
    assert not any("profiles" in service for service in services.values())
    published = [p for s in services.values() for p in s.get("ports", ())]
    assert len(published) == 4
    assert all(p.startswith("127.0.0.1:") for p in published)
    config = yaml.safe_load(files["gateway.compose.yaml"])
    for instance in config["instances"]:
        command = services[instance["id"]]["command"]
        port = command[command.index("--port") + 1]
        assert instance["base_url"] == f"http://{instance['id']}:{port}"
    devices = [
        device
        for instance in config["instances"]
        for reserved in services[instance["id"]]["deploy"]["resources"]["reservations"]["devices"]
        for device in reserved["device_ids"]
    ]
    assert devices == ["0", "1", "2", "3", "4", "5", "6"]


def test_each_machine_of_several_starts_its_own_part():
    data, files = compose(TWO_MACHINES)
    services = data["services"]
    assert services["gateway"]["profiles"] == ["gateway"]
    assert services["v100-box-tp4-0"]["profiles"] == ["v100-box"]
    assert services["mi-box-1-tp1-1"]["profiles"] == ["mi-box-1"]
    config = yaml.safe_load(files["gateway.compose.yaml"])
    for instance in config["instances"]:
        port = instance["base_url"].rsplit(":", 1)[1]
        assert services[instance["id"]]["ports"] == [f"{port}:{port}"]


def test_prometheus_scrapes_every_instance_under_its_id():
    for planned in PLANS:
        files = render_deployment(planned, options())
        targets = yaml.safe_load(files["monitoring/prometheus/instances.yml"])
        config = yaml.safe_load(files["gateway.compose.yaml"])
        assert {(t["labels"]["backend"], f"http://{t['targets'][0]}") for t in targets} == {
            (i["id"], i["base_url"]) for i in config["instances"]
        }


def test_a_dollar_sign_of_the_model_is_not_taken_for_a_variable():
    data, _ = compose(ONE_MACHINE, model="/models/$HOME")
    service = data["services"]["v100-box-tp4-0"]
    assert service["command"][0] == "${MODEL:-/models/$$HOME}"
    data, _ = compose(ONE_MACHINE, model="/models/{$HOME}")
    assert data["services"]["v100-box-tp4-0"]["command"][0] == "/models/{$$HOME}"


def test_a_checkpoint_that_nobody_knows_is_asked_for_everywhere():
    data, files = compose(ONE_MACHINE, model=None, quantization="awq")
    service = data["services"]["v100-box-tp4-0"]
    assert service["command"][0].startswith("${MODEL:?name a checkpoint")
    assert "replace-me/model" in files["kubernetes/instances.yaml"]
    assert "replace-me/model" in files["README.md"]


def test_a_make_without_a_common_image_must_be_given_one():
    data, _ = compose(EVERY_VENDOR)
    images = {name: service["image"] for name, service in data["services"].items()}
    assert images["gaudi-box-tp2-0"].startswith("${VLLM_GAUDI_IMAGE:?")
    assert images["mi-box-tp1-0"].startswith("${VLLM_ROCM_IMAGE:?")
    assert images["v100-box-tp4-0"] == "${VLLM_IMAGE:-vllm/vllm-openai:v0.32.0}"
    assert data["services"]["gaudi-box-tp2-0"]["runtime"] == "habana"
    assert "/dev/davinci0:/dev/davinci0" in data["services"]["ascend-box-tp1-0"]["devices"]
    amd = data["services"]["mi-box-tp1-1"]
    assert amd["environment"]["HIP_VISIBLE_DEVICES"] == "1"
    assert "deploy" not in amd


def test_docker_waits_longer_than_open_requests_may_take():
    data, _ = compose(ONE_MACHINE, shutdown_timeout_s=25)
    for name, service in data["services"].items():
        if name.startswith("v100"):
            command = service["command"]
            drain_s = int(command[command.index("--shutdown-timeout") + 1])
            assert float(service["stop_grace_period"].removesuffix("s")) > drain_s == 25


def test_a_thousand_instances_are_written_too():
    layouts = {f"box-{i}": ("V100-32GB-NVLink2", 8, (1,) * 8) for i in range(100)}
    files = render_deployment(plan(layouts), options())
    # A ConfigMap holds at most 1 MiB.
    assert len(files["kubernetes/gateway.yaml"].encode()) < 2**20
    assert len([name for name in files if name.startswith("commands/")]) == 100
