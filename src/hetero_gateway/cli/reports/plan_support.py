"""The report of ``plan support``: a model's facts, and a table of where it fits."""

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hetero_gateway.cli.reports.report import console, grid
from hetero_gateway.files.model_file import Bounds
from hetero_gateway.planner.accelerators import GIB, Accelerator
from hetero_gateway.planner.support import SizeFit, Support, active_parameters, layer_lines

# Wide enough for every column when the output is not a terminal.
_PIPE_WIDTH = 160
RULES = "vLLM 0.32's rules (planner/parallelism.py has each with its file)"
MEMORY = "memory: fitted to what vLLM's start-ups logged; times of a plan: as said per accelerator"


def document(found: Support, devices: Sequence[Accelerator], source: str) -> dict[str, Any]:
    """The document of ``--json``."""
    model = found.model
    return {
        "model": model.name,
        "modelled": True,
        "source": source,
        "family": model.family,
        "parameters": model.parameters,
        "active_parameters": active_parameters(model),
        "weight_bytes": dict(found.weight_bytes),
        "kv_bytes_per_token": {
            "auto": model.kv_token_bytes(),
            "fp8": model.kv_token_bytes(kv_dtype="fp8"),
        },
        "state_bytes_per_sequence": model.state_bytes,
        "layers": model.layers,
        "layer_kinds": layer_lines(model),
        "max_position": model.max_position,
        "doubts": [{"what": d.what, "kv_error": d.kv_error} for d in model.unmodelled],
        "tensor_parallel": list(found.sizes),
        "tensor_parallel_refused": {str(t): why for t, why in found.refused.items()},
        "context": found.context,
        "accelerators": [
            {
                "name": device.name,
                "memory_bytes": device.memory_bytes,
                "usable_bytes": device.usable_bytes,
                "source": device.source,
                "time_uncertainty": device.uncertainty,
                "fits": [_fit_document(f) for f in found.fits if f.accelerator == device.name],
            }
            for device in devices
        ],
    }


def _fit_document(fit: SizeFit) -> dict[str, Any]:
    told: dict[str, Any] = {"tensor_parallel": fit.tensor_parallel, "fits": not fit.reason}
    if fit.reason:
        return told | {"reason": fit.reason, "shortfall_bytes": fit.shortfall_bytes}
    return told | {
        "kv_tokens": fit.kv_tokens,
        "kv_uncertainty": fit.uncertainty,
        "sequences": fit.sequences,
        "tight": fit.tight,
    }


def print_support(found: Support, devices: Sequence[Accelerator], source: str) -> None:
    """Print the report to standard output."""
    on = console(_PIPE_WIDTH)
    model = found.model
    say = _lines(on)
    say(f"{model.name}: {source}")
    say("parameters", f"{model.parameters / 1e9:.2f} billion")
    sizes = ", ".join(f"{b / GIB:.1f} GiB as {name}" for name, b in found.weight_bytes.items())
    say("weights", sizes)
    fp8 = model.kv_token_bytes(kv_dtype="fp8")
    say("KV cache", f"{model.kv_token_bytes():.0f} bytes a token; in fp8 {fp8:.0f}")
    for i, line in enumerate(layer_lines(model)):
        say("layers" if not i else "", line)
    for doubt in model.unmodelled:
        say("in doubt", f"{doubt.what}: KV memory ± {doubt.kv_error:.0%} more")
    say("context", f"{found.context} tokens asked; made for {model.max_position or 'any number'}")
    say("vLLM takes", f"t = {', '.join(map(str, found.sizes))}")
    for t, why in found.refused.items():
        say("", f"not {t}: {why}")
    on.print()
    on.print(_table(found, devices))
    say(
        f"KV tokens · sequences of {found.context} tokens at once, or what is missing on each "
        "accelerator; ~: tight; ×: refused, as follows. ±: of the KV memory at the smallest t."
    )
    refused = [f for f in found.fits if f.reason and f.shortfall_bytes <= 0]
    for line in dict.fromkeys(f"{fit.accelerator}: {fit.reason}" for fit in refused):
        say(f"- {line}")
    say(f"From {RULES}; {MEMORY}.")


def _table(found: Support, devices: Sequence[Accelerator]) -> Table:
    sizes = [f"t = {t}" for t in found.sizes]
    rows = []
    for device in devices:
        of = [fit for fit in found.fits if fit.accelerator == device.name]
        errors = [f"± {fit.uncertainty:.0%}" for fit in of if not fit.reason]
        rows.append(
            (
                device.name,
                f"{device.usable_bytes / GIB:.1f}",
                *map(_cell, of),
                *(errors[:1] or ["–"]),
                f"± {device.uncertainty:.0%}",
                device.source,
            )
        )
    head = ("accelerator", "GiB", *sizes, "KV", "times", "figures from")
    texts = {0, 1, *range(2 + len(sizes), len(head))}
    return grid(head, rows, left=texts)


def _cell(fit: SizeFit) -> str:
    if not fit.reason:
        many = f"{fit.sequences:.0f}" if fit.sequences >= 10 else f"{fit.sequences:.1f}"
        tokens = f"{fit.kv_tokens / 1000:.{0 if fit.kv_tokens >= 10_000 else 1}f}k"
        return f"{'~' if fit.tight else ''}{tokens} · {many}"
    if fit.shortfall_bytes > 0:
        return f"−{fit.shortfall_bytes / GIB:.1f} GiB"
    return "×"


def bounds_document(bounds: Bounds) -> dict[str, Any]:
    """The document of ``--json`` for a model family that is not modelled."""
    return {
        "model": bounds.name,
        "modelled": False,
        "reason": bounds.reason,
        "layers": bounds.layers,
        "kv_bytes_per_token": {"least": 0, "most": bounds.kv_token_bytes},
        "weight_bytes": bounds.weight_bytes,
        "accelerators": [
            {"name": name, "least_count": count or None} for name, count in bounds.holding.items()
        ],
    }


def print_bounds(bounds: Bounds) -> None:
    """Print the report for a family that is not modelled."""
    on = console(_PIPE_WIDTH)
    say = _lines(on)
    say(f"{bounds.name} is not modelled: {re.sub(r'^.*config.json: ', '', bounds.reason)}")
    say("layers", str(bounds.layers))
    say("KV cache", f"at most {bounds.kv_token_bytes:.0f} bytes a token, perhaps far fewer")
    if bounds.weight_bytes is None:
        say("weights", "not known: their files, or their index, are not beside config.json")
        return
    say("weights", f"{bounds.weight_bytes / GIB:.1f} GiB, as the files say")
    for name, count in bounds.holding.items():
        least = f"at least {count}" if count else "not in 8"
        say("", f"{name}: {least}, by the weights alone")


def _lines(on: Console) -> Any:
    def say(first: str, text: str | None = None) -> None:
        on.print(first if text is None else f"{first:<11} {text}", soft_wrap=True)

    return say
