"""Where the weights of a built-in model card are: the names that vLLM can download.

Tuned versions where the publisher has one, as they have a chat template. ``MODEL=…`` in the
environment of every written script and compose file overrides the name.
"""

from __future__ import annotations

# Card to repository of the Hugging Face hub.
CHECKPOINTS: dict[str, str] = {
    "Llama-2-7B": "meta-llama/Llama-2-7b-chat-hf",
    "Llama-2-13B": "meta-llama/Llama-2-13b-chat-hf",
    "Llama-2-70B": "meta-llama/Llama-2-70b-chat-hf",
    "CodeLlama-7B": "codellama/CodeLlama-7b-Instruct-hf",
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B-Instruct",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B-Instruct",
    "Mistral-7B": "mistralai/Mistral-7B-Instruct-v0.3",
    "Mistral-Nemo-12B": "mistralai/Mistral-Nemo-Instruct-2407",
    "Mistral-Small-24B": "mistralai/Mistral-Small-24B-Instruct-2501",
    "Mixtral-8x7B": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "Mixtral-8x22B": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "phi-2": "microsoft/phi-2",
    "Phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi-4": "microsoft/phi-4",
    "Phi-4-mini": "microsoft/Phi-4-mini-instruct",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "Qwen3-4B-2507": "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen3-30B-A3B-2507": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "Qwen3-235B-A22B-2507": "Qwen/Qwen3-235B-A22B-Instruct-2507",
}
# Families whose repositories are named after the card: prefix of the card, publisher, suffix.
_FAMILIES = (
    ("Llama-3.", "meta-llama", "-Instruct"),
    ("Qwen2.5-", "Qwen", "-Instruct"),
    ("Qwen3-Coder-", "Qwen", "-Instruct"),
    ("Qwen3-Next-", "Qwen", "-Instruct"),
    ("Qwen3-", "Qwen", ""),
    ("DeepSeek-R1-Distill-", "deepseek-ai", ""),
    ("DeepSeek-", "deepseek-ai", ""),
    ("gemma-2-", "google", "-it"),
    ("gemma-3-", "google", "-it"),
    ("granite-3.", "ibm-granite", "-instruct"),
)


def checkpoint_of(card: str) -> str:
    """What ``vllm serve`` is given for a built-in card; the name itself where none is known."""
    if card in CHECKPOINTS:
        return CHECKPOINTS[card]
    for prefix, publisher, suffix in _FAMILIES:
        if card.startswith(prefix):
            return f"{publisher}/{card}{suffix}"
    return card
