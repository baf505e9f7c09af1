"""Which names are taken for one model's."""

import pytest

from hetero_gateway.core.model_names import same_model


@pytest.mark.parametrize(
    "served",
    [
        "llama-3-8b",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "Llama-3.1-8B-Instruct-AWQ",
        "/models/llama_3_8b",
        "Meta-Llama-3-8B-Instruct.w4a16-4bit",
    ],
)
def test_another_spelling_or_tuning_is_the_same_model(served: str) -> None:
    assert same_model("Llama-3-8B", served) is True


@pytest.mark.parametrize(
    ("profile", "served"),
    [
        ("Llama-3-8B", "meta-llama/Llama-3-70B"),
        ("Llama-3-8B", "DeepSeek-R1-Distill-Qwen-14B"),
        ("Llama-3-8B", "Qwen/Qwen3-8B"),
        ("Llama-3-8B", "mistral-large"),
        ("Llama-3-8B", "facebook/opt-125m"),
        ("Mixtral-8x7B", "Mixtral-8x22B-Instruct"),
        ("Qwen2.5-0.5B", "Qwen2.5-5B"),
        ("CodeLlama-7B", "Qwen-7B"),
    ],
)
def test_another_size_or_family_is_another_model(profile: str, served: str) -> None:
    assert same_model(profile, served) is False
    assert same_model(served, profile) is False


@pytest.mark.parametrize("served", ["chat", "gpt-4", "/data/model", "m", "", "llama", "int8"])
def test_a_name_that_does_not_say_is_not_judged(served: str) -> None:
    assert same_model("Llama-3-8B", served) is None


def test_a_distilled_model_belongs_to_both_families() -> None:
    assert same_model("DeepSeek-R1-Distill-Qwen-14B", "qwen2.5-14b-instruct") is True
    assert same_model("CodeLlama-7B", "Llama-2-7B") is True
