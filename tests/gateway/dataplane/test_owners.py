"""A response is its client's alone: whatever another one sends, to it there is none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.dataplane import responses
from hetero_gateway.gateway.dataplane.responses import Response, Responses
from tests.fakes.running import RunningGateway, config_for, eventually, running_gateway
from tests.fakes.vllm import FakeInstance

PATH = "/v1/responses"
MINE, YOURS = {"authorization": "Bearer ka"}, {"x-api-key": "kb"}


class Store(FakeInstance):
    """Keeps responses as vLLM does: under ``request_id``, for whoever knows that."""

    def __init__(self) -> None:
        super().__init__(("m",))
        self.asked: list[str] = []

    def _get(self, path: str) -> tuple[int, bytes]:
        status, body = super()._get(path)
        if status == 404:
            self.asked.append(path)
            return 200, b'{"secret":"of a"}'
        return status, body


def keys_of(*names: str, **fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "keys": [
            {"name": name, "hash": f"sha256:{sha256(f'k{name}'.encode()).hexdigest()}"}
            | fields.get(name, {})
            for name in names
        ]
    }


@asynccontextmanager
async def serving(
    directory: Path, *, instances: int = 1, workers: int = 1, **sections: Any
) -> AsyncIterator[tuple[RunningGateway, list[Store]]]:
    file = directory / "keys.yaml"
    file.write_text(json.dumps(keys_of("a", "b")))
    stores = [Store() for _ in range(instances)]
    for store in stores:
        await store.start()
    config = config_for([*stores], **({"clients": {"keys_file": str(file)}} | sections))
    async with running_gateway(config, workers=workers) as running:
        yield running, stores
        assert running.settled()
    for store in stores:
        await store.close()


async def ask(
    running: RunningGateway,
    method: str,
    path: str,
    headers: dict[str, str],
    body: dict[str, Any] | bytes | None = None,
) -> httpx.Response:
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    fields = {"content-type": "application/json"} | headers
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}") as client:
        return await client.request(method, path, headers=fields, content=content)


async def make(running: RunningGateway, headers: dict[str, str], name: str) -> None:
    answer = {"status": 200, "body": json.dumps({"id": name, "object": "response"})}
    body = {"model": "m", "input": "hello", "fake": answer}
    made = await ask(running, "POST", PATH, headers, body)
    assert made.status_code == 200, made.text


def received(stores: list[Store]) -> int:
    return sum(len(store.heads) + len(store.asked) for store in stores)


def same(answer: httpx.Response, unknown: httpx.Response, name: str) -> bool:
    """Whether two answers differ in the name alone that was asked for."""
    return (answer.status_code, answer.text.replace(name, "resp_unknown")) == (404, unknown.text)


@pytest.mark.parametrize("workers", [1, 2])
async def test_another_clients_response_is_as_one_that_never_was(
    tmp_path: Path, workers: int
) -> None:
    async with serving(tmp_path, instances=2, workers=workers) as (running, stores):
        await make(running, MINE, "resp_a")
        before = received(stores)
        for method, suffix in (
            ("GET", ""),
            ("GET", "?stream=true&starting_after=0"),
            ("HEAD", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
        ):
            refused = await ask(running, method, f"{PATH}/resp_a{suffix}", YOURS)
            unknown = await ask(running, method, f"{PATH}/resp_unknown{suffix}", YOURS)
            assert same(refused, unknown, "resp_a"), (method, suffix, refused.text)
        for path in (PATH, f"{PATH}/render"):
            texts = set()
            for name in ("resp_a", "resp_unknown"):
                body = {"model": "m", "input": "and then?", "previous_response_id": name}
                refused = await ask(running, "POST", path, YOURS, body)
                assert refused.status_code == 404
                assert refused.json()["error"]["code"] == "previous_response_not_found"
                texts.add(refused.text)
            assert len(texts) == 1
        assert received(stores) == before, "no instance hears of it"
        for method, suffix in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            told = None if method == "GET" else b"{}"
            mine = await ask(running, method, f"{PATH}/resp_a{suffix}", MINE, told)
            assert mine.status_code == 200
        body = {"model": "m", "input": "and then?", "previous_response_id": "resp_a"}
        assert (await ask(running, "POST", PATH, MINE, body)).status_code == 200


@pytest.mark.parametrize(
    "spelling",
    [
        b'{"model":"m","input":"x","previous_response_id":"resp_\\u0061"}',
        b'{"model":"m","input":"x","previous\\u005fresponse_id":"resp_a"}',
        b'{"model":"m","input":"x","previous_response_id":null,"previous_response_id":"resp_a"}',
        b'{"model":"m","input":"x","n":NaN,"previous_response_id":"resp_a"}',
        b'{"model":"m","input":"x","previous_response_id":"resp_a", "metadata":{"a":"\\ud800"}}',
        b'{"model":"m","input":"x","previous_response_id":["resp_a"]}',
        b'{"model":"m","input":"x","previous_response_id":""}',
        b'{"model":"m","input":"x","previous_response_id":7}',
        b'{"model":"m","input":"x","previous_response_id":"' + b"r" * 5000 + b'"}',
        b'{"model":"m","input":"' + b"x" * 300_000 + b'","previous_response_id":"resp_a"}',
        '{"model":"m","input":"x","previous_response_id":"resp_a"}'.encode("utf-16"),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
async def test_no_spelling_of_a_reference_reaches_an_instance(
    tmp_path: Path, spelling: bytes, kind: str
) -> None:
    async with serving(tmp_path) as (running, stores):
        await make(running, MINE, "resp_a")
        refused = await ask(running, "POST", PATH, YOURS | {"content-type": kind}, spelling)
        assert refused.status_code == 404, refused.text
        assert received(stores) == 1


@pytest.mark.parametrize(
    "field",
    [
        b'"request_id":"resp_a"',
        b'"request\\u005fid":"resp_a"',
        b'"request_id":null,"request_id":"resp_a"',
        b'"conversation":"conv_a"',
        b'"conversation":{"id":"conv_a"}',
    ],
)
async def test_a_client_cannot_name_what_is_stored(tmp_path: Path, field: bytes) -> None:
    body = b'{"model":"m","input":"x",%b}' % field
    async with serving(tmp_path) as (running, stores):
        refused = await ask(running, "POST", PATH, YOURS, body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        # A request's id no client may choose; a conversation none whose responses are its own.
        refusal = (error["code"], error["param"])
        assert refusal == (
            ("unsupported_parameter", "conversation")
            if b"conversation" in field
            else ("field_not_allowed", "request_id")
        )
        assert received(stores) == 0
        # Elsewhere the field names nothing that is kept.
        body = b'{"model":"m","prompt":"x","request_id":"mine"}'
        assert (await ask(running, "POST", "/v1/completions", YOURS, body)).status_code == 200


async def test_the_id_of_a_request_is_never_another_ones(tmp_path: Path) -> None:
    """An engine may make a response's id of it."""
    async with serving(tmp_path) as (running, stores):
        named = {"x-request-id": "chosen"}
        body = {"model": "m", "input": "x"}
        ids = set()
        for headers in (MINE, YOURS, YOURS):
            answer = await ask(running, "POST", PATH, headers | named, body)
            assert answer.headers["x-request-id"].startswith("chosen-")
            ids.add(answer.headers["x-request-id"])
        assert len(ids) == 3
        assert all(any(name.encode() in head for head in stores[0].heads) for name in ids), (
            "it is the one that the instance got"
        )
        long = await ask(running, "POST", PATH, MINE | {"x-request-id": "x" * 128}, body)
        assert len(long.headers["x-request-id"]) == 128
        chat = {"model": "m", "messages": []}
        answer = await ask(running, "POST", "/v1/chat/completions", YOURS | named, chat)
        assert answer.headers["x-request-id"] == "chosen"


async def test_an_id_that_two_were_given_leads_each_to_its_own(tmp_path: Path) -> None:
    scheduler = {"policy": "round-robin"}
    async with serving(tmp_path, instances=2, scheduler=scheduler) as (running, _):
        await make(running, MINE, "resp_1")
        await make(running, YOURS, "resp_1")
        asked = []
        for headers in (MINE, YOURS, MINE):
            answer = await ask(running, "GET", f"{PATH}/resp_1", headers)
            asked.append(answer.headers["x-hetero-gateway-instance"])
        assert asked == ["i0", "i1", "i0"]


async def test_keys_of_one_name_share_and_one_key_is_one_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (running, _):
        await make(running, MINE, "resp_a")
        again = {"x-api-key": "ka"}
        assert (await ask(running, "GET", f"{PATH}/resp_a", again)).status_code == 200
    monkeypatch.setenv("THE_KEY", "shared")
    shared, server = {"authorization": "Bearer shared"}, {"api_key_env": "THE_KEY"}
    async with serving(tmp_path, clients={}, server=server) as (running, _):
        await make(running, shared, "resp_a")
        assert (await ask(running, "GET", f"{PATH}/resp_a", shared)).status_code == 200
        body = {"model": "m", "input": "x", "previous_response_id": "resp_of_before"}
        assert (await ask(running, "POST", PATH, shared, body)).status_code == 200
    # Beside named ones it is one more owner, and no way to the others' responses.
    async with serving(tmp_path, server=server) as (running, stores):
        await make(running, MINE, "resp_a")
        before = received(stores)
        body = {"model": "m", "input": "x", "previous_response_id": "resp_a"}
        assert (await ask(running, "POST", PATH, shared, body)).status_code == 404
        assert (await ask(running, "GET", f"{PATH}/resp_a", shared)).status_code == 404
        assert received(stores) == before


async def test_what_is_forgotten_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, stores):
        await make(running, MINE, "resp_a")
        intake = running.gateway.dataplane.intake
        intake.responses = Responses()  # as after a restart
        before = received(stores)
        body = {"model": "m", "input": "x", "previous_response_id": "resp_a"}
        for headers in (MINE, YOURS):
            assert (await ask(running, "POST", PATH, headers, body)).status_code == 404
            assert (await ask(running, "GET", f"{PATH}/resp_a", headers)).status_code == 404
        assert received(stores) == before


async def test_a_new_scheduler_process_hears_of_responses_from_the_workers(tmp_path: Path) -> None:
    scheduler = {"policy": "round-robin"}
    async with serving(tmp_path, instances=2, workers=2, scheduler=scheduler) as (running, _):
        for number in range(4):
            await make(running, MINE, f"resp_{number}")
        dataplane = running.gateway.dataplane
        await eventually(lambda: len(dataplane.intake.responses) == 4)
        dataplane.intake.responses = Responses()
        for worker in running.workers:
            channel = worker.remote._channel
            assert channel is not None
            channel.abort()
        await eventually(lambda: all(worker.remote.alone for worker in running.workers))
        await eventually(lambda: not any(worker.remote.alone for worker in running.workers))
        await eventually(lambda: len(dataplane.intake.responses) == 4)
        for number in range(4):
            for headers, status in ((MINE, 200), (YOURS, 404)):
                answer = await ask(running, "GET", f"{PATH}/resp_{number}", headers)
                assert answer.status_code == status
                body = {"model": "m", "input": "x", "previous_response_id": f"resp_{number}"}
                assert (await ask(running, "POST", PATH, headers, body)).status_code == status


async def test_where_clients_are_isolated_by_credentials_a_response_has_an_owner_too(
    tmp_path: Path,
) -> None:
    sections: dict[str, Any] = {"clients": {}, "scheduler": {"isolate_clients": True}}
    async with serving(tmp_path, **sections) as (running, stores):
        await make(running, MINE, "resp_a")
        before = received(stores)
        body = {"model": "m", "input": "x", "previous_response_id": "resp_a"}
        for headers in (YOURS, {}):
            assert (await ask(running, "POST", PATH, headers, body)).status_code == 404
        assert received(stores) == before
        assert (await ask(running, "POST", PATH, MINE, body)).status_code == 200


def test_one_owner_cannot_push_out_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_MOST_RESPONSES", 100)
    table = Responses()

    def note(number: int, owner: str) -> bytes:
        name = number.to_bytes(8, "little")
        table.note(Response(name, InstanceId("i"), 10, None, 1, "m", owner), float(number))
        return name

    few = [note(number, "a") for number in range(30)]
    for number in range(1000, 3000):
        note(number, "b")
    assert len(table) == 100
    assert all(table.find(name, 3000.0) for name in few)
    for number in range(4000, 4100):
        note(number, "a")
    assert table.owners() == {"a": 50, "b": 50}
