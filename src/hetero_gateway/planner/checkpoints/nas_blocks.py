"""Models whose layers were chosen one by one (Llama-Nemotron): ``block_configs``.

Each block says how many query heads share a KV head, and how wide its MLP is as a multiple of the
hidden size; either may be left out of a block, or be one square matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hetero_gateway.planner.checkpoints.fields import Fields
from hetero_gateway.planner.model_shape import Cache, ModelShape

# The MLP's width is two thirds of the multiple, rounded up to this (vllm/.../nemotron_nas.py).
_WIDTH_STEP = 256


def with_blocks(shape: ModelShape, fields: Fields) -> ModelShape:
    """The shape with the layers that its blocks describe."""
    attention = mlp = 0
    kept: dict[int, int] = {}  # layers by KV heads
    widths: set[int] = set()
    for block in fields.items("block_configs"):
        part: Mapping[str, Any] = block.get("attention", {})
        if part.get("replace_with_linear"):
            attention += shape.hidden * shape.hidden
        elif not part.get("no_op"):
            kv_heads = shape.heads // int(part.get("n_heads_in_group") or 1)
            kept[kv_heads] = kept.get(kv_heads, 0) + 1
            attention += 2 * shape.hidden * shape.head_dim * (shape.heads + kv_heads)
        part = block.get("ffn", {})
        if part.get("replace_with_linear"):
            mlp += shape.hidden * shape.hidden
        elif not part.get("no_op"):
            width = _width(float(part.get("ffn_mult") or 0), shape.hidden)
            widths.add(width)
            mlp += 3 * shape.hidden * width
    return dataclasses.replace(
        shape,
        kv_heads=min(kept, default=shape.heads),
        intermediate=max(widths, default=0),
        attention_weights=attention,
        dense_weights=mlp,
        caches=tuple(Cache(n, heads, 2 * shape.head_dim) for heads, n in sorted(kept.items())),
    )


def _width(multiple: float, hidden: int) -> int:
    plain = int(2 * multiple * hidden / 3)
    return -(-plain // _WIDTH_STEP) * _WIDTH_STEP
