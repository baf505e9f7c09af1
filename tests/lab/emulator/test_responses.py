"""Responses that are kept, as vLLM keeps them with VLLM_ENABLE_RESPONSES_API_STORE=1."""

PATH = "/v1/responses"
LONG = "a careful clerk " * 60


def ask(instance, text, previous=None, **fields):
    body = {"input": text, "max_output_tokens": 24, "ignore_eos": True, **fields}
    return instance.post(PATH, body | ({"previous_response_id": previous} if previous else {}))


def test_what_continues_a_response_has_its_prompt_and_its_answer_in_front(emulate):
    one = emulate(store_responses=True)
    first = ask(one, LONG, instructions="Be kind.").json()
    second = ask(one, "And now?", first["id"], instructions="Be kind.").json()
    assert second["previous_response_id"] == first["id"]
    usage, before = second["usage"], first["usage"]["total_tokens"]
    assert usage["input_tokens"] > before
    # All that has KV: prompt and answer but for its newest token, in blocks of 16.
    assert usage["input_tokens_details"]["cached_tokens"] == (before - 1) // 16 * 16
    # Instructions are each response's own.
    other = ask(one, "And now?", first["id"]).json()["usage"]
    assert other["input_tokens"] < usage["input_tokens"]
    assert other["input_tokens_details"]["cached_tokens"] == 0


def test_a_response_is_there_by_its_id_and_cannot_be_cancelled(emulate):
    one = emulate(store_responses=True)
    made = ask(one, "Hello.").json()
    assert one.http.get(f"{PATH}/{made['id']}").json() == made
    refused = one.post(f"{PATH}/{made['id']}/cancel", {})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "Cannot cancel a synchronous response."
    assert one.post(f"{PATH}/{made['id']}", {}).status_code == 405


def test_nothing_is_kept_by_default_nor_where_the_client_says_so(emulate):
    for kept, more in ((False, {}), (True, {"store": False})):
        one = emulate(store_responses=kept)
        name = ask(one, "Hello.", **more).json()["id"]
        for answer in (ask(one, "And now?", name), one.http.get(f"{PATH}/{name}")):
            assert answer.status_code == 404
            assert answer.json()["error"] == {
                "message": f"Response with id '{name}' not found.",
                "type": "invalid_request_error",
                "param": "response_id",
                "code": 404,
            }
