"""vLLM's paths and the marks in its answers."""

import pytest

from hetero_gateway.engines.vllm import Work, failed_in_tail, usage_in_tail, work_of_path


@pytest.mark.parametrize(
    ("path", "work"),
    [
        ("/v1/chat/completions", Work.GENERATE),
        ("/v1/embeddings", Work.PREFILL),
        ("/tokenize", Work.LIGHT),
        ("/v1/something/new", Work.PREFILL),
        ("/v1/load_lora_adapter", None),
        ("/reset_prefix_cache", None),
        ("/nope", None),
    ],
)
def test_paths(path: str, work: Work | None) -> None:
    assert work_of_path(path) is work


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'"usage":{"prompt_tokens":14,"total_tokens":20,"completion_tokens":6}}', (14, 6)),
        (b'"usage": {"completion_tokens": 6, "prompt_tokens": 14}', (14, 6)),
        (b'"usage":{"input_tokens":10,"output_tokens":5,"output_tokens_details":{}}', (10, 5)),
        (b'"usage":{"prompt_tokens":1,"completion_tokens":1}}\n"usage":{"prompt_tokens":2,'
         b'"completion_tokens":3}}', (2, 3)),
        (b'"usage":null', (None, None)),
        (b'{"content":"\\"usage\\":{\\"prompt_tokens\\":9}"}', (None, None)),
        (b"", (None, None)),
    ],
)  # fmt: skip
def test_usage_is_read_from_the_tail(tail: bytes, usage: tuple[int | None, int | None]) -> None:
    assert usage_in_tail(tail) == usage


def test_an_engines_failure_is_seen_and_a_clients_text_is_not() -> None:
    assert failed_in_tail(b'data: {"error": {"code": 500}}\n\ndata: [DONE]\n\n')
    assert failed_in_tail(b'"finish_reason":"abort"')
    assert not failed_in_tail(b'data: {"content":"data: {\\"error\\""}\n\n')
