"""Paths, refusals, key, metrics: everything around the answers."""

import json
import time
from pathlib import Path

import pytest

from hetero_gateway.engines.vllm import CacheFacts, EngineMetrics, read_metrics

CHAT = {"messages": [{"role": "user", "content": "def f(x): return x"}], "max_tokens": 2}
# Values that the engine refuses, shapes that validation refuses.
REFUSED = json.loads(Path(__file__).with_name("refusals.json").read_text())
JSON = {"content-type": "application/json"}


def test_models_list_every_name_with_the_window(instance):
    data = instance.http.get("/v1/models").json()["data"]
    told = [(model["id"], model["max_model_len"], model["owned_by"]) for model in data]
    assert told == [("tiny", 4096, "vllm"), ("alias", 4096, "vllm")]


def test_small_pages(instance):
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = instance.http.request(method, path)
        assert (response.status_code, response.content) == (200, b"")
    assert instance.http.get("/version").json()["version"].startswith("0.")
    assert instance.http.get("/load").json() == {"server_load": 0}


def test_tokenize_and_back(instance):
    text = "def f(x): return π"
    answer = instance.ask("/tokenize", {"prompt": text, "return_token_strs": True})
    assert (answer["count"], answer["max_model_len"]) == (5, 4096)
    assert len(answer["tokens"]) == len(answer["token_strs"]) == 5
    assert instance.ask("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}
    usage = instance.ask("/v1/chat/completions", CHAT)["usage"]
    chat = instance.ask("/tokenize", {"messages": CHAT["messages"]})
    assert chat["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["says"])
def test_what_vllm_refuses_is_refused_in_its_words(instance, case):
    response = instance.post(case["path"], case["body"])
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"], error["code"]) == (case["type"], case["param"], 400)
    assert case["says"] in error["message"]


@pytest.mark.parametrize(
    ("content", "headers", "param"),
    [
        (b'{"model": "tiny", "messages": [', JSON, "body.31"),
        (b"", JSON, "body"),
        (b"[1,2]", JSON, "body"),
        (b"{}", {"content-type": "text/plain"}, None),
        (b"{}", {}, None),
    ],
)
def test_a_body_that_is_no_json_object(instance, content, headers, param):
    response = instance.http.post("/v1/chat/completions", content=content, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "Bad Request", param)
    assert error["message"].startswith("1 validation error:\n  ")


def test_a_body_that_is_not_utf8(instance):
    response = instance.http.post("/v1/completions", content=b'{"prompt": "\xff"}', headers=JSON)
    assert response.status_code == 400
    assert response.json() == {"detail": "There was an error parsing the body"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_an_unknown_model(instance, path):
    response = instance.post(path, {**CHAT, "prompt": "x", "model": "nope"})
    assert response.status_code == 404
    assert response.json() == {
        "error": {
            "message": "The model `nope` does not exist. Valid aliases: tiny, alias.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }


def test_messages_has_an_error_body_of_its_own(instance):
    body = instance.post("/v1/messages", {**CHAT, "model": "nope"}).json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "NotFoundError"


def test_a_prompt_beyond_the_window(instance):
    for prompt, param, said in (
        ([5] * 5000, "input_tokens", "prompt contains 5000 input tokens"),
        ("word " * 5000, "input_tokens", "prompt contains at least 4097 input tokens"),
        ([5] * 4096, "max_tokens", "max_tokens must be at least 1, got 0."),
    ):
        response = instance.post("/v1/completions", {"prompt": prompt})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert said in error["message"]


def test_unknown_paths_and_methods(instance):
    for path in ("/nope", "/v1/audio/speech", "/"):
        response = instance.http.get(path)
        assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})
    for method, path, allow in (
        ("GET", "/v1/chat/completions", "POST"),
        ("HEAD", "/health", "GET"),
        ("POST", "/metrics", "GET"),
    ):
        response = instance.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allow)


def test_a_key_guards_v1_only(emulate):
    instance = emulate(api_key="sk-1")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "sk-1"}):
        for response in (
            instance.http.get("/v1/models", headers=headers),
            instance.post("/v1/chat/completions", CHAT, headers=headers),
            instance.post("/v1/nonexistent", {}, headers=headers),
        ):
            assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
    right = {"Authorization": "Bearer sk-1"}
    assert instance.post("/v1/chat/completions", CHAT, headers=right).status_code == 200
    # As with the real one, this one generates without a key.
    assert instance.post("/invocations", {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert instance.http.get("/metrics").status_code == 200


def test_metrics_have_vllms_series_and_bounds(emulate):
    instance = emulate(num_gpu_blocks=300, models=("tiny",))
    instance.post("/v1/completions", {"prompt": [1] * 50, "max_tokens": 5, "ignore_eos": True})
    text = instance.http.get("/metrics").text
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0' in text
    for label in ('block_size="16"', 'num_gpu_blocks="300"', 'kv_cache_size_tokens="4800"'):
        assert label in text
    told = read_metrics(text)
    assert told == EngineMetrics(
        0, 0, 0, 50, 5, 0, 50, 0, told.started_s, told.asleep,
        cache=CacheFacts(4800, 16, None, "auto", prefix_caching=True),
    )  # fmt: skip
    assert abs(told.started_s - time.time()) < 3600
    success = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'
    assert f"{success} 1.0" in text
    for name, count, bound in (
        ("time_to_first_token_seconds", 1, 2560.0),
        ("e2e_request_latency_seconds", 1, 7680.0),
        ("request_time_per_output_token_seconds", 1, 80.0),
        ("inter_token_latency_seconds", 4, 80.0),
        ("request_prompt_tokens", 1, 2000.0),
    ):
        assert instance.metric(f"vllm:{name}_count") == count
        assert f'vllm:{name}_bucket{{engine="0",le="{bound}"' in text
