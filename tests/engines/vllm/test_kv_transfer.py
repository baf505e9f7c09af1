"""A request in two: bodies byte for byte, hand-overs whole or none, answers as of one instance."""

import json
import random
from typing import Any

import pytest

from hetero_gateway.engines.vllm import kv_transfer
from hetero_gateway.engines.vllm.kv_transfer import (
    CONNECTORS,
    Beginning,
    Mending,
    NoHandover,
    PrefillAnswer,
    Transfer,
    beginning_of,
    decode_body,
    may_be_fetched,
    mended_body,
    mended_events,
    mending_of,
    mooncake_engine_ids,
    prefill_body,
    read_answer,
    reason_against,
)
from tests.fuzz.mutation import mutated_bytes, mutated_json

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
NIXL, PUSH, MOONCAKE = (CONNECTORS[f"{name}Connector"] for name in ("Nixl", "NixlPush", "Mooncake"))
# As vLLM 0.32 answers a prefill of 871 tokens in blocks of 128.
HANDED: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]], "remote_engine_id": "f8dbf2d4",
    "remote_request_id": "cmpl-pd-first-0-b19df489", "remote_host": "127.0.0.1",
    "remote_port": 5601, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 871,
    "remote_blocks_expiry_time": None, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
}  # fmt: skip
WRONG_BLOCKS: list[Any] = [[], [[]], None, [[-1]], [["1"]]]
OF_128 = Transfer(block_tokens=128)


def answer(parameters: object = HANDED, finish: str = "length", **more: object) -> bytes:
    document = {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": " x", "finish_reason": finish}],
        "usage": {"prompt_tokens": 871, "completion_tokens": 1, "total_tokens": 872},
        "kv_transfer_params": parameters,
    }
    return json.dumps(document | more).encode()


def handed(parameters: object = HANDED, transfer: Transfer = OF_128) -> bytes:
    return NIXL.for_decode(transfer, read_answer(COMPLETIONS, answer(parameters)))


# -- bodies


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_a_prefill_is_the_clients_body_with_fields_at_its_end(path: str) -> None:
    body = (
        b'{"model" :"m","prompt":"\\u00e9 \xc3\xa9","n":1,"max_tokens":64,"min_tokens":9,'
        b'"max_completion_tokens":70,"ignore_eos":true,"stream":true, '
        b'"stream_options":{"include_usage":true},"temperature":0.70,"kv_transfer_params":null } \n'
    )
    made = prefill_body(path, body, NIXL.for_prefill(Transfer()))
    assert made.startswith(body.rstrip()[:-1])
    read = json.loads(made)
    assert (read["stream"], read["stream_options"]) == (False, None)
    assert (read["min_tokens"], read["ignore_eos"], read["temperature"]) == (0, False, 0.7)
    assert {read["max_tokens"], read["max_completion_tokens"]} == {1}
    assert read["kv_transfer_params"] == {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
        "remote_block_ids": None, "remote_host": None, "remote_port": None,
    }  # fmt: skip
    assert ("store" in read) == (path == RESPONSES)  # the decode instance's is the one to be kept


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        (CHAT, {"max_completion_tokens": 1}),
        (COMPLETIONS, {"max_tokens": 1}),
        (RESPONSES, {"max_output_tokens": 1, "store": False}),
    ],
)
def test_a_prefill_of_a_plain_body_gets_its_limit_and_nothing_else(
    path: str, limit: dict[str, Any]
) -> None:
    asked = {"model": "m", "input": "x"}
    assert json.loads(prefill_body(path, json.dumps(asked).encode(), b"")) == asked | limit


def test_a_decode_request_is_the_clients_body_and_what_was_handed_over() -> None:
    body = b'{"prompt":"x","stream":true,"kv_transfer_params":null}'
    given = handed()
    assert given == json.dumps(HANDED).encode()  # unchanged
    assert decode_body(body, given) == body[:-1] + b',"kv_transfer_params":' + given + b"}"
    assert decode_body(body, b"") == body
    logprobs = decode_body(b'{"prompt":"x","prompt_logprobs":2}', given)
    assert json.loads(logprobs)["prompt_logprobs"] is None


@pytest.mark.parametrize(
    ("path", "more", "reason"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"]}, "several prompts"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "several prompts"),
        (COMPLETIONS, {"n": 2}, "several answers"),
        (COMPLETIONS, {"max_tokens": 1}, "nothing to decode"),
        (COMPLETIONS, {"echo": True}, "begins with the prompt"),
        (CHAT, {"use_beam_search": True}, "beams"),
        (CHAT, {"tool_choice": "required"}, "a tool"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "continues a response"),
        (RESPONSES, {"background": True}, "background"),
        ("/v1/embeddings", {}, "path"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 16}, ""),
        (COMPLETIONS, {"prompt": [1, 2, 3], "echo": False}, ""),
        (COMPLETIONS, {"prompt": ["a"]}, ""),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "tool_choice": "auto"}, ""),
        (RESPONSES, {"input": "x", "previous_response_id": None, "max_output_tokens": 10}, ""),
    ],
)
def test_which_requests_can_be_split(path: str, more: dict[str, Any], reason: str) -> None:
    found = reason_against(path, json.dumps(more).encode())
    assert (reason in found) if reason else found == ""


@pytest.mark.parametrize("body", [b'{"x":NaN}', b"[]", b"\xff\xfe{\x00}\x00", b'{"prompt":'])
def test_what_is_json_to_python_alone_goes_whole(body: bytes) -> None:
    assert reason_against(COMPLETIONS, body)


# -- hand-overs


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in HANDED.items() if key != name}


@pytest.mark.parametrize(
    "wrong",
    [
        without("remote_port"),  # the engine would never answer, and die when its client leaves
        *(without(f"remote_{name}") for name in ("host", "engine_id", "request_id", "block_ids")),
        *(HANDED | {"remote_port": port} for port in (0, 65536, "5601", None)),
        *(HANDED | {"remote_block_ids": ids} for ids in WRONG_BLOCKS),
        HANDED | {"remote_block_ids": [[1, 2, 3, 4, 5, 6]]},  # the engine would die at once
        HANDED | {"remote_num_tokens": 870},
        HANDED | {"do_remote_prefill": False},
        HANDED | {"do_remote_decode": True},
        HANDED | {"transfer_mode": "push"},
        HANDED | {"remote_host": "h" * 600},
        HANDED | {"padding": "x" * (1 << 20)},
        "text",
        [],
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_a_hand_over_that_would_kill_an_engine_is_none(wrong: object) -> None:
    with pytest.raises(NoHandover):
        handed(wrong)


def test_groups_of_blocks() -> None:
    windowed = HANDED | {"remote_block_ids": [[6, 7], [1, 2, 3, 4, 5, 6, 7]]}
    flat = without("remote_num_tokens") | {"remote_block_ids": [1, 2, 3, 4, 5, 6, 7]}
    ranks = HANDED | {"remote_block_ids": [[1, 2, 3, 4]], "dcp_size": 2}
    for whole in (windowed, flat, ranks):
        assert json.loads(handed(whole)) == whole
    fewer = HANDED | {"remote_block_ids": [[1]]}
    assert handed(fewer, Transfer())  # how large its blocks are is not known
    pushed = HANDED | {"transfer_mode": "push"}
    assert PUSH.for_decode(OF_128, read_answer(COMPLETIONS, answer(pushed)))


def test_an_answer_without_parameters_may_have_ended() -> None:
    for finish, ended in (("length", False), ("stop", True)):
        told = read_answer(COMPLETIONS, answer(None, finish))
        with pytest.raises(NoHandover) as refused:
            NIXL.for_decode(OF_128, told)
        assert refused.value.ended is ended
    # vLLM hands over at a stop, too: then the decode instance draws its own first token.
    assert NIXL.for_decode(OF_128, read_answer(COMPLETIONS, answer(HANDED, "stop")))


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"choices":1}', b'{"usage":"x"}'])
def test_an_answer_that_is_none(body: bytes) -> None:
    with pytest.raises(NoHandover, match="cannot be read"):
        read_answer(CHAT, body)


def test_what_prefill_answers_say_on_each_path() -> None:
    chat = {
        "choices": [{"finish_reason": "stop"}],
        "prompt_logprobs": [None, {"1": {"logprob": -0.5}}],
        "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4, "x": None}},
    }
    said = read_answer(CHAT, json.dumps(chat).encode())
    logprobs = b'[null, {"1": {"logprob": -0.5}}]'
    assert said == PrefillAnswer(b"", 9, 4, True, logprobs, (("cached_tokens", 4),))
    usage = {"input_tokens": 5, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 2}
    message = {"stop_reason": "max_tokens", "usage": usage}
    said = read_answer(MESSAGES, json.dumps(message).encode())
    assert said == PrefillAnswer(b"", 23, 16, counts=tuple(usage.items()))
    response = {
        "status": "completed",
        "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}},
    }
    said = read_answer(RESPONSES, json.dumps(response).encode())
    assert said == PrefillAnswer(b"", 9, 8, True, counts=(("cached_tokens", 8),))


def test_a_lease_leaves_time_for_the_decode_request() -> None:
    assert [may_be_fetched(age_s) for age_s in (24.9, 25.0)] == [True, False]
    assert [may_be_fetched(age_s, lease_s=4) for age_s in (1.9, 2.0)] == [True, False]


def test_whatever_an_instance_answers_is_whole_or_nothing() -> None:
    rng = random.Random(29)
    whole = json.loads(answer())
    taken = 0
    for _ in range(1000):
        path = rng.choice((CHAT, COMPLETIONS, MESSAGES, RESPONSES))
        said = mutated_json(rng, whole)
        if rng.random() < 0.3:
            said = mutated_bytes(rng, said)
        beginning_of(path, b"data: " + said + b"\n\n")
        try:
            read = read_answer(path, said)
            mended_body(path, said, mending_of(read))
            mended_events(path, b"data: " + said + b"\n\n", mending_of(read))
            given = json.loads(NIXL.for_decode(OF_128, read))
        except NoHandover:
            continue
        taken += 1
        (ids,) = given["remote_block_ids"]
        assert len(ids) >= 7
        assert 0 < given["remote_port"] < 65536
        assert all(given[f"remote_{name}"] for name in ("host", "engine_id", "request_id"))
    assert taken > 20


# -- other connectors


def test_shared_stores_need_no_parameters() -> None:
    store = CONNECTORS["LMCacheConnectorV1"]
    assert (store.pairs, store.at_once) == (False, False)
    assert store.for_prefill(Transfer()) == b""
    assert store.for_decode(Transfer(), read_answer(CHAT, answer(None))) == b""


def test_mooncakes_requests_name_one_transfer() -> None:
    transfer = Transfer("t-1", bootstrap="http://p:8998", engine_id="e")
    assert MOONCAKE.at_once
    assert json.loads(MOONCAKE.for_prefill(transfer)) == {
        "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t-1",
    }  # fmt: skip
    assert json.loads(MOONCAKE.for_decode(transfer, None)) == {
        "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "t-1",
        "remote_bootstrap_addr": "http://p:8998", "remote_engine_id": "e",
    }  # fmt: skip
    with pytest.raises(NoHandover):
        MOONCAKE.for_decode(Transfer("t-1"), None)
    ids = mooncake_engine_ids(b'{"0":{"engine_id":"a"},"1":{"engine_id":7},"x":{"engine_id":"b"}}')
    assert ids == {0: "a"}
    assert mooncake_engine_ids(b"[]") == {}


# -- the answer


def test_parameters_reach_no_client() -> None:
    left = b'{"id":"a","choices":[{"x":1.50}],"kv_transfer_params":null}'
    assert mended_body(CHAT, left) is left  # but for the look, nothing is done
    told = b'{"id":"a","choices":[{"x":1.50}],"kv_transfer_params":{"remote_host":"h"}}'
    assert mended_body(CHAT, told) == left
    plain = b'data: {"id":"a","choices":[]}\n\n'
    last = b'data: {"id":"a","choices":[],"ec_transfer_params":{"remote_host":"h"}}\n\n'
    done = b"data: [DONE]\n\n"
    hidden = last.replace(b'{"remote_host":"h"}', b"null")
    assert mended_events(CHAT, plain + last + done) == plain + hidden + done
    nested = b'event: response.completed\ndata: {"response":{"id":"r","kv_transfer_params":{}}}\n\n'
    assert mended_events(RESPONSES, nested) == nested.replace(b"{}", b"null")
    said = json.dumps({"choices": [{"text": 'a "kv_transfer_params": {} b'}]}).encode()
    assert json.loads(mended_body(COMPLETIONS, said)) == json.loads(said)


# What vLLM 0.32 tells of a prompt of 146 tokens with 128 in whole blocks: the prefill instance, the
# decode instance, and one that has not split it.
CHATS = (
    {"prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 128}},
    {"prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0}},
)
TURNS = (
    {"prompt_tokens_details": {"cached_tokens": 128, "created_cache_tokens": 0, "x": None}},
    {"prompt_tokens_details": {"cached_tokens": 146, "created_cache_tokens": 0, "x": None}},
)
ANSWERS = (
    {"input_tokens": 146, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 128}},
    {"input_tokens": 146, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}},
)
CLAUDES = (
    {"input_tokens": 18, "cache_creation_input_tokens": 128, "cache_read_input_tokens": 0},
    {"input_tokens": 146, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
)


@pytest.mark.parametrize(
    ("path", "prefilled", "decoded"),
    [(CHAT, *CHATS), (COMPLETIONS, *TURNS), (RESPONSES, *ANSWERS), (MESSAGES, *CLAUDES)],
)
@pytest.mark.parametrize("within", ["", "response"])
def test_the_prompts_counts_are_the_prefill_instances(
    path: str, prefilled: dict[str, Any], decoded: dict[str, Any], within: str
) -> None:
    mending = mending_of(read_answer(path, answer(usage=prefilled)))
    before, after = ({"id": "a", "usage": usage, "z": 1.5} for usage in (decoded, prefilled))
    assert json.loads(mended_body(path, json.dumps(before).encode(), mending)) == after
    if within:
        before, after = {within: before}, {within: after}
    event = mended_events(path, b"event: e\ndata: %b\n\n" % json.dumps(before).encode(), mending)
    head, _, data = event.partition(b"data: ")
    assert (head, json.loads(data), event[-2:]) == (b"event: e\n", after, b"\n\n")


def test_what_a_decode_instance_does_not_tell_stays_untold() -> None:
    mending = mending_of(read_answer(COMPLETIONS, answer(usage=TURNS[0])))
    untold = answer(None, usage={"prompt_tokens": 871, "prompt_tokens_details": None})
    assert mended_body(COMPLETIONS, untold, mending) == untold
    # The first event of a message counts the whole prompt, and says nothing of caches.
    begun = b'data: {"message":{"usage":{"input_tokens":146,"output_tokens":0}}}\n\n'
    of_message = mending_of(read_answer(MESSAGES, answer(usage=CLAUDES[0])))
    assert mended_events(MESSAGES, begun, of_message) == begun


def test_prompt_logprobs_are_the_prefill_instances() -> None:
    mending = Mending(prompt_logprobs=b'[null,{"5":{"logprob":-1.250}}]')
    chat = b'{"choices":[{"a":1}],"prompt_logprobs":null}'
    assert mended_body(CHAT, chat, mending) == chat.replace(b"null", mending.prompt_logprobs)
    two = b'{"choices":[{"a":1,"prompt_logprobs":null},{"prompt_logprobs":null}]}'
    assert mended_body(COMPLETIONS, two, mending) == two.replace(b"null", mending.prompt_logprobs)


@pytest.mark.parametrize("text", [b"", b"not JSON _transfer_params", b"data: x_transfer_params\n"])
def test_what_is_no_document_stays(text: bytes) -> None:
    assert mended_body(CHAT, text, Mending((("cached_tokens", 1),))) == text
    assert mended_events(CHAT, text, Mending((("cached_tokens", 1),))) == text


# -- how its stream begins, as vLLM 0.32 streams it

ERROR = b'data: {"error": {"message": "Internal server error", "param": null, "code": 500}}\n\n'
ROLE = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},'
    b'"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}\n\n'
)
TEXT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":" a"},"finish_reason":null}]}\n\n'
EOS = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}\n\n'
CALL = b'data: {"id":"c","choices":[{"delta":{"role":"assistant","tool_calls":[{"index":0}]}}]}\n\n'
START = b'event: message_start\ndata: {"type":"message_start","message":{"id":"m"}}\n\n'
BLOCK = b'event: content_block_start\ndata: {"type":"content_block_start","index":0}\n\n'
BROKEN = b'event: error\ndata: {"type":"error","error":{"type":"internal_error"}}\n\n'
CREATED = (
    b'event: response.created\ndata: {"response":{"error":null},"type":"response.created"}\n\n'
)
ITEM = b'event: response.output_item.added\ndata: {"type":"response.output_item.added"}\n\n'
COMPLETION = b'data: {"id":"c","choices":[{"index":0,"text":"","finish_reason":null}]}\n\n'


@pytest.mark.parametrize(
    ("path", "opening", "more", "found"),
    [
        (CHAT, ROLE, ERROR, Beginning.FAILED),
        (CHAT, ROLE, TEXT, Beginning.BEGUN),
        (CHAT, ROLE, EOS, Beginning.BEGUN),
        (CHAT, ROLE, b"data: [DONE]\n\n", Beginning.FAILED),
        (CHAT, b"", CALL, Beginning.BEGUN),
        (COMPLETIONS, b": a comment\n\n", ERROR, Beginning.FAILED),
        (COMPLETIONS, b"", COMPLETION, Beginning.BEGUN),
        (COMPLETIONS, b"", b"data: 7\n\n", Beginning.BEGUN),
        (MESSAGES, START, BROKEN, Beginning.FAILED),
        (MESSAGES, START, BLOCK, Beginning.BEGUN),
        (RESPONSES, CREATED, ITEM, Beginning.BEGUN),
        (RESPONSES, CREATED, b'data: {"type":"response.failed"}\n\n', Beginning.FAILED),
    ],
)
def test_the_first_events_of_a_decode_stream(
    path: str, opening: bytes, more: bytes, found: Beginning
) -> None:
    for end in range(len(opening + more)):  # however it comes in
        assert beginning_of(path, (opening + more)[:end]) is Beginning.OPENING
    assert beginning_of(path, opening + more) is found
    assert beginning_of(path, (opening + more + TEXT).replace(b"\n", b"\r\n")) is found


def test_every_connector_by_its_name() -> None:
    assert all(name == each.name for name, each in CONNECTORS.items())
    assert kv_transfer.SPLIT_PATHS == {CHAT, COMPLETIONS, MESSAGES, RESPONSES}
