"""What is asked of an instance by other methods than POST; wrong methods, unknown paths."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from hetero_gateway.engines.vllm import ENGINE_CALLS, WORK_BY_PATH
from tests.fakes.gateway_files import clients
from tests.fakes.running import rig
from tests.fakes.vllm import FakeInstance


class Telling(FakeInstance):
    """Answers every GET and DELETE with what was asked, and makes responses."""

    def __init__(self, *models: str) -> None:
        super().__init__(models or ("m",))
        self.asked: list[bytes] = []

    def _get(self, path: str) -> tuple[int, bytes]:
        status, body = super()._get(path)
        if status != 404:
            return status, body
        self.asked.append(path.encode())
        return 200, json.dumps({"path": path, "of": self.models}).encode()


async def make_response(
    client: httpx.AsyncClient, name: str, model: str = "m", **options: Any
) -> httpx.Response:
    answer = {"status": 200, "body": json.dumps({"id": name, "object": "response"})}
    body = {"model": model, "input": "hello", "fake": answer}
    made = await client.post("/v1/responses", json=body, **options)
    assert made.status_code == 200, made.text
    return made


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_response_is_read_listed_deleted_and_cancelled_where_it_was_made(
    workers: int,
) -> None:
    fakes = Telling(), Telling()
    scheduler = {"policy": "round-robin"}
    async with rig(fakes, workers=workers, scheduler=scheduler) as (running, client, _):
        for number in range(4):
            name = f"resp_{number}"
            home = (await make_response(client, name)).headers["x-hetero-gateway-instance"]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}") as other:
                for method, path in (
                    ("GET", f"/v1/responses/{name}?include=a&include=b"),
                    ("GET", f"/v1/responses/{name}/input_items?limit=2"),
                    ("HEAD", f"/v1/responses/{name}"),
                    ("DELETE", f"/v1/responses/{name}"),
                    ("POST", f"/v1/responses/{name}/cancel"),
                ):
                    body = {} if method in ("DELETE", "POST") else None
                    answer = await other.request(method, path, json=body)
                    assert answer.status_code == 200, (method, answer.text)
                    assert answer.headers["x-hetero-gateway-instance"] == home
                    assert answer.headers["x-request-id"]
                    if method == "GET":
                        assert answer.json()["path"] == path
        methods = {head.split(b" ")[0] for fake in fakes for head in fake.heads}
        assert methods == {b"POST", b"DELETE"}


async def test_a_stream_of_a_response_is_passed_on_as_it_comes() -> None:
    fake = Telling()
    async with rig([fake]) as (_, client, _):
        await make_response(client, "resp_1")
        fake.fault = {"events": 5, "delay_s": 0.5, "first_delay_s": 0.5}
        # The fake streams where its request says so: this one has a body.
        came, loop = [], asyncio.get_running_loop()
        path = "/v1/responses/resp_1/cancel"
        async with client.stream("POST", path, json={"stream": True}) as answer:
            async for part in answer.aiter_bytes():
                came.append((loop.time(), part))
        assert len(came) >= 5
        assert came[-1][0] - came[0][0] > 1.5


@pytest.mark.parametrize("workers", [1, 2])
async def test_what_a_tokenizer_is_like_is_asked_by_model(workers: int) -> None:
    one, other = Telling("a"), Telling("b")
    async with rig([one, other], workers=workers) as (_, client, _):
        for model in ("a", "b", "a"):
            answer = await client.get("/tokenizer_info", params={"model": model})
            assert answer.json() == {"path": f"/tokenizer_info?model={model}", "of": [model]}
        nobody = await client.get("/tokenizer_info?model=c")
        assert nobody.status_code == 404
        assert nobody.json()["error"]["code"] == "model_not_found"
        which = await client.get("/tokenizer_info")
        assert which.status_code == 400
        assert which.json()["error"]["param"] == "model"


async def test_a_clients_key_models_and_limits_apply(tmp_path: Any) -> None:
    keys = clients(tmp_path, a={}, b={"models": ["b"]})
    async with rig([Telling("a")], clients=keys) as (_, client, _):
        mine, yours = {"authorization": "Bearer ka"}, {"authorization": "Bearer kb"}
        client.headers.update(mine)
        await make_response(client, "resp_1", "a")
        for path, status, code in (
            ("/v1/responses/resp_1", 404, "response_not_found"),
            ("/tokenizer_info?model=a", 403, "model_not_allowed"),
        ):
            assert (await client.get(path)).status_code == 200
            refused = await client.get(path, headers=yours)
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
            stranger = await client.get(path, headers={"authorization": "Bearer x"})
            assert stranger.status_code == 401


async def test_fields_that_connection_names_end_here() -> None:
    fake = Telling()
    async with rig([fake]) as (_, client, _):
        await make_response(client, "resp_1")
        await client.delete(
            "/v1/responses/resp_1", headers={"connection": "x-mine", "x-mine": "1", "x-other": "2"}
        )
        assert b"x-mine" not in fake.heads[-1]
        assert b"x-other: 2" in fake.heads[-1]


async def test_what_concerns_an_engine_is_not_passed_on() -> None:
    fake = Telling()
    async with rig([fake]) as (_, client, _):
        for path, method in ENGINE_CALLS.items():
            for asked in {method, "GET", "POST"}:
                answer = await client.request(asked, path, json={})
                assert answer.status_code == 403
                error = answer.json()["error"]
                assert error["code"] == "engine_call"
                assert f"/admin/instances/ID/engine{path}" in error["message"]
        assert not fake.asked
        assert not fake.requests


async def test_every_404_and_405_has_openais_body() -> None:
    async with rig([Telling()]) as (_, client, _):
        cases = [("GET", path, "POST") for path in WORK_BY_PATH]
        cases += [
            ("POST", "/v1/responses/resp_1", "GET, DELETE"),
            ("GET", "/v1/responses/resp_1/cancel", "POST"),
            ("POST", "/v1/responses/resp_1/input_items", "GET"),
            ("PUT", "/tokenizer_info", "GET"),
            ("DELETE", "/v1/models", "GET, HEAD"),
            ("POST", "/metrics", "GET, HEAD"),
            ("PATCH", "/health", "GET, HEAD"),
            ("POST", "/livez", "GET, HEAD"),
            ("POST", "/v1/models", "GET, HEAD"),
            ("DELETE", "/tokenize", "POST"),
            ("OPTIONS", "/v1/messages", "POST"),
            ("PUT", "/admin/instances", "GET, HEAD, POST"),
            ("PUT", "/ping", "GET, HEAD, POST"),
            ("POST", "/docs", "GET, HEAD"),
            ("POST", "/openapi.json", "GET, HEAD"),
            ("POST", "/dashboard", "GET, HEAD"),
            ("POST", "/admin/explain", "GET, HEAD"),
            ("GET", "/admin/reload", "POST"),
        ]
        for method, path, allowed in cases:
            answer = await client.request(method, path)
            assert answer.status_code == 405, path
            assert answer.headers["allow"] == allowed, path
            assert_error(answer, "method_not_allowed")
        for path in ("/nothing", "/v1", "/v1/files", "/admin/nothing", "/dashboard/x",
                     "/v1/responses/", "/v1/responses/a/b", "/v1/responses/../sleep", "/v1//models",
                     "/v1/responses/%2e%2e", "/docs/oauth2-redirect", "/v1/models/"):  # fmt: skip
            request = client.build_request("GET", path)
            request.url = request.url.copy_with(raw_path=path.encode())
            answer = await client.send(request)
            assert answer.status_code == 404, path
            assert_error(answer, "not_found")
        assert (await client.get("/v1/models/none")).json()["error"]["code"] == "model_not_found"
        assert (await client.get("/ping")).status_code == 200
        front = await client.get("/")
        assert (front.status_code, front.headers["location"]) == (307, "dashboard")


def assert_error(answer: httpx.Response, code: str) -> None:
    document = answer.json()
    if answer.request.url.path.startswith("/v1/messages"):
        assert set(document) == {"type", "error"}
        return
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert document["error"]["code"] == code
