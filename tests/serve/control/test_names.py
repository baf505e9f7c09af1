"""Names that /admin, files and instances give: printable and short, or refused in one line."""

import json
import logging
from pathlib import Path

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.client_keys import read_keys
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from tests.fakes.running import eventually, rig
from tests.fakes.vllm import FakeInstance, fake_instances

ODD = {
    "NUL": "a\0b",
    "line feed": "a\nb",
    "escape": "\x1b[31mred",
    "delete": "a\x7f",
    "bidirectional override": "a\u202eb",
    "private use": "\ue000",
    "empty": "",
    "10 000 characters": "x" * 10_000,
    "257 characters": "x" * 257,
}
SURROGATE = '"\\ud800"'  # as JSON has it: no text can


@pytest.mark.parametrize("field", ["model", "models", "id", "base_url", "profile", "api_key_env"])
@pytest.mark.parametrize("odd", [*ODD, "lone surrogate"])
async def test_a_name_that_cannot_be_one_is_refused_in_one_line(
    field: str, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with fake_instances(1) as more, rig() as (running, client, _):
        value = SURROGATE if odd == "lone surrogate" else json.dumps(ODD[odd])
        fields = {"id": '"new"', "base_url": json.dumps(more[0].url)}
        if field == "models":
            field, value = "model", f'["good", {value}]'
        fields[field] = value
        body = "{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}"
        answer = await client.post("/admin/instances", content=body)
        assert answer.status_code in (400, 422), answer.text
        told = answer.json()["error"]["message"]
        assert len(told) < 1000
        assert told.isprintable(), "it quotes nothing that a terminal would obey"
        patched = await client.patch("/admin/instances/i0", content=body)
        assert patched.status_code in (400, 422)
        assert len(await running.metrics()) < 10**6
        assert [*running.gateway.fleet.instances] == ["i0"]
    assert not [r for r in caplog.records if r.exc_info]
    assert all(r.getMessage().isprintable() for r in caplog.records)
    assert all(len(r.getMessage()) < 2000 for r in caplog.records)


async def test_paths_with_odd_names_are_answered_and_logged_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with rig() as (_, client, _):
        for name in ("%00", "%0a", "%1b[31m", "%ed%a0%80", "x" * 10_000):
            for method, path in (
                ("DELETE", f"/admin/instances/{name}"),
                ("PATCH", f"/admin/instances/{name}"),
                ("POST", f"/admin/instances/{name}/engine/sleep"),
                ("POST", f"/admin/models/{name}/engine/sleep"),
                ("GET", f"/admin/observations?instance={name}"),
                ("GET", f"/admin/explain?prompt_tokens=1&model={name}"),
                ("GET", f"/v1/models/{name}"),
            ):
                answer = await client.request(method, path)
                assert answer.status_code < 500, (method, path[:60], answer.text[:300])
                assert len(answer.content) < 2000, (method, path[:60])
    assert not [r for r in caplog.records if r.exc_info]
    assert all(r.getMessage().isprintable() for r in caplog.records)


async def test_odd_names_that_an_instance_lists_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake, rows = FakeInstance(), [{"id": name} for name in ("good", *ODD.values())]
    fake.models_body = json.dumps({"object": "list", "data": rows}).encode()
    async with rig([fake]) as (running, *_):
        instance = running.gateway.fleet.instances["i0"]  # type: ignore[index]
        await eventually(lambda: instance.models == {"good"})
        probed = running.gateway.health._probed[instance.id]
        await eventually(lambda: probed.scrapes > 20)
        told = [r.getMessage() for r in caplog.records if "are ignored" in r.getMessage()]
        assert len(told) == 1
        assert f"{len(ODD)} of the models" in told[0]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    "place",
    [
        {"instances": [{"id": "a", "base_url": "http://a", "model": "ODD"}]},
        {"instances": [{"id": "a", "base_url": "http://a", "model": ["m", "ODD"]}]},
        {"models": {"ODD": {"serve": "m"}}},
        {"models": {"a": {"serve": "ODD"}}},
        {"models": {"a": {"split": {"ODD": 1}}}},
        {"models": {"a": {"fallbacks": [{"model": "ODD"}]}}},
        {"scheduler": {"slo": {"models": {"ODD": {"ttft_s": 1}}}}},
        {"discovery": [{"name": "d", "kind": "dns", "host": "h", "model": "ODD"}]},
        {"clients": {"groups": {"g": {"models": ["ODD"]}}}},
        {"clients": {"groups": {"ODD": {}}}},
    ],
)
def test_a_configuration_with_such_a_name_is_refused_in_lines_that_can_be_read(
    place: dict[str, object], odd: str, tmp_path: Path
) -> None:
    def put(value: object) -> object:
        if isinstance(value, dict):
            return {put(name): put(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [put(inner) for inner in value]
        return ODD[odd] if value == "ODD" else value

    path = tmp_path / "gateway.yaml"
    path.write_text(json.dumps(put(place)))
    with pytest.raises(ConfigError) as caught:
        load_gateway_config(path)
    for line in caught.value.args:
        assert line.isprintable()
        assert len(line) < 1000


def test_long_and_odd_keys_of_a_file_of_keys_are_shown_in_short(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": [{"name": "a", "\x1b[31m" + "x" * 10_000: 1}]}))
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert all(line.isprintable() and len(line) < 1000 for line in caught.value.args)


def test_names_of_up_to_256_printable_characters_are_fine() -> None:
    names = ["x" * 256, "Qwen/Qwen3-8B", "模型", "a b", "ünïcödé"]
    config = GatewayConfig.model_validate(
        {"instances": [{"id": "a", "base_url": "http://a", "model": names}]}
    )
    assert config.instances[0].models == {*names}
