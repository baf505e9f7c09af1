"""Two unequal Llama models with random weights, and a tokenizer for both; nothing is downloaded.

Run by scripts/real-vllm in the engines' virtual environment (it needs torch, transformers and
tokenizers): ``python build_models.py DIRECTORY``. Seeded: the same files every time. A model that
is there already is left alone.

The tokenizer is a byte-level BPE of 2 048 entries, trained on the sources of the standard library.
The weights are random, so the text means nothing; lengths are forced with ``ignore_eos``.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 2048
CONTEXT_TOKENS = 4096
# hidden size, layers, heads, KV heads: about 300 and 65 output tokens/s alone on one core. Head
# sizes are 64 for both, which the CPU attention kernels want.
SHAPES = {"small": (256, 4, 4, 2), "large": (768, 8, 12, 4)}
TRAINING_FILES = 300
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:TRAINING_FILES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sources], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=CONTEXT_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def build(directory: Path, shape: tuple[int, int, int, int], seed: int) -> None:
    """Write one model; ``directory`` appears whole or not at all."""
    hidden, layers, heads, kv_heads = shape
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(partial)
    train_tokenizer().save_pretrained(partial)
    partial.rename(directory)


def main() -> None:
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    for seed, (name, shape) in enumerate(SHAPES.items()):
        if not (root / name).is_dir():
            build(root / name, shape, seed)


if __name__ == "__main__":
    main()
