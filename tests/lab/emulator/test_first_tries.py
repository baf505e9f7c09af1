"""What people try first beside chats: probabilities, scores, token counts, adapters."""

import json

import pytest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "def f(x): return x"}]}
FORCED = {"max_tokens": 3, "ignore_eos": True}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_a_chat_names_the_likeliest_tokens_at_each_place(instance):
    asked = {**CHAT, **FORCED, "logprobs": True, "top_logprobs": 2}
    (choice,) = instance.ask(CHATS, asked)["choices"]
    told = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in told) == choice["message"]["content"]
    for each in told:
        assert list(each) == ["token", "logprob", "bytes", "top_logprobs"]
        assert bytes(each["bytes"]).decode() == each["token"]
        assert each["logprob"] <= 0
        assert [list(top) for top in each["top_logprobs"]] == [["token", "logprob", "bytes"]] * 2
        assert len({top["token"] for top in each["top_logprobs"]}) == 2
    role, *deltas = [chunk["choices"][0] for chunk in instance.chunks(CHATS, asked)]
    assert role["logprobs"] is None
    for delta in deltas:
        (each,) = delta["logprobs"]["content"]
        assert each["token"] == delta["delta"]["content"] == each["top_logprobs"][0]["token"]


def test_without_top_logprobs_only_the_chosen_token_is_told(instance):
    (choice,) = instance.ask(CHATS, {**CHAT, **FORCED, "logprobs": True})["choices"]
    assert [each["top_logprobs"] for each in choice["logprobs"]["content"]] == [[]] * 3
    (choice,) = instance.ask(CHATS, {**CHAT, **FORCED})["choices"]
    assert choice["logprobs"] is None


def test_a_completion_tells_probabilities_in_the_older_shape(instance):
    asked = {"prompt": "a b", **FORCED, "logprobs": 2}
    (choice,) = instance.ask(COMPLETIONS, asked)["choices"]
    told = choice["logprobs"]
    assert list(told) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    for at, token, top in zip(
        told["text_offset"], told["tokens"], told["top_logprobs"], strict=True
    ):
        assert choice["text"][at:].startswith(token)
        assert len(top) == 2
    said = ""
    for (chunk,) in (chunk["choices"] for chunk in instance.chunks(COMPLETIONS, asked)):
        assert chunk["logprobs"]["text_offset"] == [len(said)]
        assert chunk["logprobs"]["tokens"] == [chunk["text"]]
        said += chunk["text"]


def test_each_choice_has_its_own_probabilities(instance):
    asked = {"prompt": "a b", **FORCED, "logprobs": 0, "n": 2}
    choices = instance.ask(COMPLETIONS, asked)["choices"]
    assert ["".join(c["logprobs"]["tokens"]) for c in choices] == [c["text"] for c in choices]


def test_a_text_that_holds_the_mark_stays_as_it_is(instance):
    mark = {"type": "object", "properties": {"logprobs": {"const": None}}, "required": ["logprobs"]}
    schema = {"type": "json_schema", "json_schema": {"schema": mark}}
    body = {**CHAT, "logprobs": True, "response_format": schema}
    (choice,) = instance.ask(CHATS, body)["choices"]
    assert json.loads(choice["message"]["content"]) == {"logprobs": None}
    assert choice["logprobs"]["content"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_texts_are_scored_in_pairs(instance, path):
    body = instance.ask(path, {"text_1": "a cat", "text_2": ["a cat", "the sea"]})
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert [(each["index"], each["object"]) for each in body["data"]] == [
        (0, "score"),
        (1, "score"),
    ]
    assert body["data"][0]["score"] == 1 > body["data"][1]["score"] >= 0
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    other = instance.ask(path, {"queries": ["a", "b"], "documents": ["a", "c"]})
    assert [each["score"] == 1 for each in other["data"]] == [True, False]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_the_best_first(instance, path):
    documents = ["the deep sea", {"text": "a black cat"}, "a cat"]
    asked = {"model": "tiny", "query": "a cat", "documents": documents}
    results = instance.ask(path, asked)["results"]
    assert [result["index"] for result in results] == [2, 1, 0]
    assert results[1]["document"] == {"text": "a black cat", "multi_modal": None}
    assert instance.ask(path, {**asked, "top_n": 1})["results"] == results[:1]


def test_tokens_of_a_message_are_counted_as_they_are_charged(instance):
    message = {**CHAT, "system": "Be brief."}
    counted = instance.ask("/v1/messages/count_tokens", message)["input_tokens"]
    answered = instance.ask("/v1/messages", {**message, "max_tokens": 1})
    assert counted == answered["usage"]["input_tokens"]


def test_adapters_come_and_go_and_are_listed_with_their_base(instance):
    def listed():
        data = instance.http.get("/v1/models").json()["data"]
        return {card["id"]: (card["parent"], card["root"]) for card in data}

    load = instance.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/lora/sql"})
    assert (load.status_code, load.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert listed()["sql"] == ("tiny", "/lora/sql")
    assert instance.ask(COMPLETIONS, {"model": "sql", "prompt": "x"})
    for status in (200, 404):
        unload = instance.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert unload.status_code == status
        assert set(listed()) == {"tiny", "alias"}
    assert unload.json()["error"]["message"] == "The lora adapter 'sql' cannot be found."
