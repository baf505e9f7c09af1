"""A response is its client's alone: whatever another one sends, to it there is none."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.dataplane import responses
from hetero_gateway.gateway.dataplane.responses import Response, Responses
from tests.fakes.gateway_files import clients
from tests.fakes.running import RunningGateway, eventually, rig
from tests.gateway.dataplane.test_asked import Telling, make_response

PATH = "/v1/responses"
MINE, YOURS = {"authorization": "Bearer ka"}, {"x-api-key": "kb"}


@asynccontextmanager
async def serving(
    directory: Path, *, instances: int = 1, workers: int = 1, **sections: Any
) -> AsyncIterator[tuple[RunningGateway, list[Telling]]]:
    stores = [Telling() for _ in range(instances)]
    sections = {"clients": clients(directory, a={}, b={})} | sections
    async with rig(stores, workers=workers, **sections) as (running, *_):
        yield running, stores
        assert running.settled()


def client_of(running: RunningGateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}")


async def ask(
    running: RunningGateway,
    method: str,
    path: str,
    headers: dict[str, str],
    body: dict[str, Any] | bytes | None = None,
) -> httpx.Response:
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    fields = {"content-type": "application/json"} | headers
    async with client_of(running) as client:
        return await client.request(method, path, headers=fields, content=content)


async def make(running: RunningGateway, headers: dict[str, str], name: str) -> None:
    async with client_of(running) as client:
        await make_response(client, name, headers=headers)


async def follow(
    running: RunningGateway, headers: dict[str, str], name: str, path: str = PATH
) -> httpx.Response:
    """Continue a response."""
    body = {"model": "m", "input": "and then?", "previous_response_id": name}
    return await ask(running, "POST", path, headers, body)


def received(stores: list[Telling]) -> int:
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
                refused = await follow(running, YOURS, name, path)
                assert refused.status_code == 404
                assert refused.json()["error"]["code"] == "previous_response_not_found"
                texts.add(refused.text)
            assert len(texts) == 1
        assert received(stores) == before, "no instance hears of it"
        for method, suffix in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            told = None if method == "GET" else b"{}"
            mine = await ask(running, method, f"{PATH}/resp_a{suffix}", MINE, told)
            assert mine.status_code == 200
        assert (await follow(running, MINE, "resp_a")).status_code == 200


SPELLINGS = (
    b'"previous_response_id":"resp_\\u0061"',
    b'"previous\\u005fresponse_id":"resp_a"',
    b'"previous_response_id":null,"previous_response_id":"resp_a"',
    b'"n":NaN,"previous_response_id":"resp_a"',
    b'"previous_response_id":"resp_a", "metadata":{"a":"\\ud800"}',
    b'"previous_response_id":["resp_a"]',
    b'"previous_response_id":""',
    b'"previous_response_id":7',
    b'"previous_response_id":"%b"' % (b"r" * 5000),
)


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
async def test_no_spelling_of_a_reference_reaches_an_instance(tmp_path: Path, kind: str) -> None:
    plain = b'{"model":"m","input":"x","previous_response_id":"resp_a"}'
    bodies = [b'{"model":"m","input":"x",%b}' % spelling for spelling in SPELLINGS]
    bodies += [plain.replace(b"x", b"x" * 300_000), plain.decode().encode("utf-16")]
    async with serving(tmp_path) as (running, stores):
        await make(running, MINE, "resp_a")
        for body in bodies:
            refused = await ask(running, "POST", PATH, YOURS | {"content-type": kind}, body)
            assert refused.status_code == 404, (body[:100], refused.text)
            assert received(stores) == 1


async def test_a_client_cannot_name_what_is_stored(tmp_path: Path) -> None:
    # A request's id no client may choose; a conversation none whose responses are its own.
    its_id = ("field_not_allowed", "request_id")
    conversation = ("unsupported_parameter", "conversation")
    async with serving(tmp_path) as (running, stores):
        for field, refusal in (
            (b'"request_id":"resp_a"', its_id),
            (b'"request\\u005fid":"resp_a"', its_id),
            (b'"request_id":null,"request_id":"resp_a"', its_id),
            (b'"conversation":"conv_a"', conversation),
            (b'"conversation":{"id":"conv_a"}', conversation),
        ):
            body = b'{"model":"m","input":"x",%b}' % field
            refused = await ask(running, "POST", PATH, YOURS, body)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["code"], error["param"]) == refusal
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
        assert (await follow(running, shared, "resp_of_before")).status_code == 200
    # Beside named ones it is one more owner, and no way to the others' responses.
    async with serving(tmp_path, server=server) as (running, stores):
        await make(running, MINE, "resp_a")
        before = received(stores)
        assert (await follow(running, shared, "resp_a")).status_code == 404
        assert (await ask(running, "GET", f"{PATH}/resp_a", shared)).status_code == 404
        assert received(stores) == before


async def test_what_is_forgotten_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (running, stores):
        await make(running, MINE, "resp_a")
        intake = running.gateway.dataplane.intake
        intake.responses = Responses()  # as after a restart
        before = received(stores)
        for headers in (MINE, YOURS):
            assert (await follow(running, headers, "resp_a")).status_code == 404
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
            channel.abort()
        await eventually(lambda: all(worker.remote.alone for worker in running.workers))
        await eventually(lambda: not any(worker.remote.alone for worker in running.workers))
        await eventually(lambda: len(dataplane.intake.responses) == 4)
        for number in range(4):
            for headers, status in ((MINE, 200), (YOURS, 404)):
                answer = await ask(running, "GET", f"{PATH}/resp_{number}", headers)
                assert answer.status_code == status
                follows = await follow(running, headers, f"resp_{number}")
                assert follows.status_code == status


async def test_where_clients_are_isolated_by_credentials_a_response_has_an_owner_too(
    tmp_path: Path,
) -> None:
    sections: dict[str, Any] = {"clients": {}, "scheduler": {"isolate_clients": True}}
    async with serving(tmp_path, **sections) as (running, stores):
        await make(running, MINE, "resp_a")
        before = received(stores)
        for headers in (YOURS, {}):
            assert (await follow(running, headers, "resp_a")).status_code == 404
            assert (await ask(running, "GET", f"{PATH}/resp_a", headers)).status_code == 404
        assert received(stores) == before
        assert (await follow(running, MINE, "resp_a")).status_code == 200
        assert (await ask(running, "GET", f"{PATH}/resp_a", MINE)).status_code == 200


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
