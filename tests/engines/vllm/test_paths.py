"""What each path makes an engine do."""

import pytest

from hetero_gateway.engines.vllm import Work, work_of_path


@pytest.mark.parametrize(
    ("path", "work"),
    [
        ("/v1/chat/completions", Work.GENERATE),
        ("/v1/embeddings", Work.PREFILL),
        ("/tokenize", Work.LIGHT),
        ("/v1/something/new", None),
        ("/v1/load_lora_adapter", None),
        ("/reset_prefix_cache", None),
        ("/nope", None),
    ],
)
def test_paths(path: str, work: Work | None) -> None:
    assert work_of_path(path) is work
