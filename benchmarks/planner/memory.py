"""Fit the planner's memory model to vLLM's start-up logs, and say how far it is off.

    python benchmarks/planner/memory.py FACTS.csv

A row of FACTS.csv is one start-up: the model's shape, the card, what vLLM was told, and what it
logged (columns as read in ``Fact``). Printed, as Markdown: the coefficients, of all rows, which
``hetero_gateway.planner.memory.FITTED`` should be; the errors of the KV capacity by model family,
with that family left out of the fit, beside those of Eq. (1) as the paper has it; and what is said
of the deployments that vLLM refused.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.planner.accelerators import GIB, Accelerator
from hetero_gateway.planner.memory import (
    FITTED,
    Coefficients,
    EngineOptions,
    StartUp,
    is_feasible,
)
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.plan import MemoryEstimate

# Where the rows of a fit say nothing of a coefficient, it stays here: counts, not fits. A logit is
# copied to 4 bytes, sorted (4, and 8 for where it was), turned into a probability, summed up,
# scattered back and made a probability again (4 each), and masked; since 0.17 it is copied, turned
# and made, beside its own 2 bytes. Memory in GiB: round figures.
PRIOR = Coefficients(
    mlp=1.0,
    logit_bytes_before_0_17=37.0,
    logit_bytes=14.0,
    outside_before_0_6=0.7,
    outside_before_0_17=0.15,
    outside=0.25,
    fast_link=1.8,
    slow_link=FITTED.slow_link,
    graphs=0.2,
    graphs_per_layer=0.02,
    sigma=FITTED.sigma,
    sigma_others=FITTED.sigma_others,
    sigma_link=FITTED.sigma_link,
    sigma_graphs=FITTED.sigma_graphs,
)
# The prior counts as one row that is this much off, relative.
PRIOR_WIDTH = 0.3
NOT_FITTED = {"slow_link", "sigma", "sigma_others", "sigma_link", "sigma_graphs"}
# What a log is off by, GiB: beyond it, a row weighs less (a card that something else was using).
LOG_WIDTH = 0.1


@dataclass(frozen=True)
class Fact:
    """One row."""

    name: str
    card: str
    model: ModelShape
    accelerator: Accelerator
    tensor_parallel: int
    options: EngineOptions
    kv_bytes: float  # of the instance
    activations_gib: float | None
    outside_gib: float | None
    graphs_gib: float | None
    refused: bool

    def start_up(self, c: Coefficients) -> StartUp:
        return StartUp(self.model, self.accelerator, self.tensor_parallel, self.options, c)

    @property
    def family(self) -> str:
        name = self.name.rsplit("/", 1)[-1].casefold()
        for known in (
            "codellama", "llama-2", "llama-3", "mixtral", "mistral", "gemma", "granite", "qwen3",
            "qwen", "phi", "gpt-oss", "deepseek", "yi",
        ):  # fmt: skip
            if known in name:
                # Code Llama is Llama 2, trained on.
                return "llama-2" if known == "codellama" else known
        return name.split("-")[0]


def read_facts(path: Path) -> list[Fact]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    facts = []
    for number, row in enumerate(rows, start=2):
        try:
            fact = _fact(row)
        except (ConfigError, ValueError, KeyError) as error:
            print(f"line {number} is left out: {error!r}", file=sys.stderr)
            continue
        if fact is not None:
            facts.append(fact)
    return facts


def _fact(row: dict[str, str]) -> Fact | None:
    t = int(row["tp"])
    kv_gib, tokens = _number(row["kv_gib_logged"]), _number(row["kv_tokens_logged"])
    token_bytes = _number(row["kv_bytes_per_token_instance"])
    if tokens is not None and token_bytes is not None:
        kv_bytes = tokens * token_bytes
    elif kv_gib is not None:
        kv_bytes = kv_gib * t * GIB
    else:
        return None
    version = row["vllm_version"]
    options = EngineOptions(
        utilisation=_number(row["util"]) or 0.9,
        max_model_len=_whole(row["max_model_len"]),
        max_num_seqs=_whole(row["max_num_seqs"]),
        max_num_batched_tokens=_whole(row["max_num_batched_tokens"]),
        # "V1" alone: the row's memory is that of the versions around the others'.
        vllm_version=version if re.match(r"v?\d", version) else "0.19",
        kv_dtype="fp8" if "kvfp8" in row["dtype"] else "auto",
        enforce_eager="enforce_eager" in row.get("note", ""),
    )
    return Fact(
        name=row["model"],
        card=row["gpu"],
        model=_shape(row),
        accelerator=_accelerator(row),
        tensor_parallel=t,
        options=options,
        kv_bytes=kv_bytes,
        activations_gib=_number(row["act_peak_gib_logged"]),
        outside_gib=_number(row["non_torch_gib_logged"]),
        graphs_gib=_number(row["cudagraph_gib_logged"]),
        refused="refused" in row.get("note", ""),
    )


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def _whole(text: str | None) -> int | None:
    return int(float(text)) if text else None


def _shape(row: dict[str, str]) -> ModelShape:
    """From the card of that name, else from the row's own columns."""
    dtype, _, stored = row["dtype"].partition("/")
    if dtype not in ("float16", "bfloat16", "float32"):
        dtype, stored = "float16", row["dtype"]
    method = next(
        (m for m in ("w4a16", "w8a8", "gptq", "awq", "int4", "int8", "mxfp4") if m in stored), None
    )
    if method is None and stored.startswith("fp8"):
        method = "fp8"
    name = row["model"].rsplit("/", 1)[-1]
    name = re.sub(r"-(gptq|awq|quantized\.\w+|fp8)$", "", name, flags=re.IGNORECASE)
    try:
        card = model_card(name, dtype=dtype, quantization=method)
    except ConfigError:
        card = dataclasses.replace(
            _from_columns(row),
            dtype=dtype,
            quantization=model_card("Llama-3-8B", quantization=method).quantization,
        )
    return dataclasses.replace(card, name=row["model"])


def _from_columns(row: dict[str, str]) -> ModelShape:
    """Tied or not, gated or not: whichever comes nearest to the published parameters."""
    published = float(row["params_b"]) * 1e9

    def shape(tied: bool, gated: bool) -> ModelShape:
        return ModelShape(
            row["model"],
            *(int(row[name]) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim")),
            vocabulary=int(row["vocab"]),
            intermediate=int(row["intermediate"]),
            tied_embeddings=tied,
            gated=gated,
        )

    choices = [shape(tied, gated) for tied in (False, True) for gated in (True, False)]
    best = min(choices, key=lambda choice: abs(choice.parameters - published))
    missing = int(published - best.parameters)
    if abs(best.parameters / published - 1) > 0.02:
        # Experts, or what else the columns do not show: weights as published.
        attention = 2 * best.layers * best.hidden * best.head_dim * (best.heads + best.kv_heads)
        best = dataclasses.replace(best, attention_weights=attention + missing)
    return best


def _accelerator(row: dict[str, str]) -> Accelerator:
    """By its name in the catalogue; a card that it does not have is what its log says."""
    name = row["gpu"].split("-")[0]
    nominal = _number(row.get("gpu_mem_nominal_gib")) or float(row["gpu_mem_gib"])
    for known in (row["gpu"], name, f"{name}-{nominal:g}GB-SXM", f"{name}-{nominal:g}GB-NVLink2"):
        try:
            found = accelerator(known)
        except ConfigError:
            continue
        if abs(found.memory_bytes / GIB - nominal) < 1:
            return found
    return Accelerator(
        row["gpu"], 1e12, nominal * GIB, 1e12, 300e9,
        usable_memory_bytes=float(row["gpu_mem_gib"]) * GIB,
        cuda_capability=8.0,
    )  # fmt: skip


def estimate(fact: Fact, c: Coefficients, paper: bool = False) -> MemoryEstimate:
    return fact.start_up(c).memory("paper" if paper else "fitted")


def fit(facts: Sequence[Fact]) -> Coefficients:
    """All coefficients from these rows: robust, and near the prior where they say nothing."""
    from scipy.optimize import least_squares  # 300 modules

    names = [f.name for f in dataclasses.fields(Coefficients) if f.name not in NOT_FITTED]
    prior = np.array([getattr(PRIOR, name) for name in names])

    def of(values: np.ndarray) -> Coefficients:
        return dataclasses.replace(
            PRIOR, **{n: float(v) for n, v in zip(names, values, strict=True)}
        )

    def residuals(values: np.ndarray) -> np.ndarray:
        c = of(values)
        off = [r / LOG_WIDTH for fact in facts for r in _residuals_gib(fact, c)]
        return np.array([*off, *((values - prior) / (PRIOR_WIDTH * prior))])

    return of(least_squares(residuals, prior, bounds=(0, np.inf), loss="soft_l1").x)


def _residuals_gib(fact: Fact, c: Coefficients) -> list[float]:
    """Each logged part; where there is no log of the parts, the KV memory itself."""
    off = []
    parts = {name: each / GIB for name, each in estimate(fact, c).parts.items()}
    if fact.activations_gib is not None:
        off.append(parts["activations"] - fact.activations_gib)
    if fact.outside_gib is not None:
        off.append(fact.start_up(c).outside_bytes() / GIB - fact.outside_gib)
    if fact.graphs_gib is not None:
        off.append(c.graphs + c.graphs_per_layer * fact.model.layers - fact.graphs_gib)
    if fact.activations_gib is None:
        kv = (estimate(fact, c).kv_bytes - fact.kv_bytes) / fact.tensor_parallel
        off.append(kv / GIB)
    return off


def errors(facts: Sequence[Fact], c: Coefficients, paper: bool = False) -> np.ndarray:
    """Estimated over logged KV memory, minus 1."""
    return np.array([estimate(fact, c, paper).kv_bytes / fact.kv_bytes - 1 for fact in facts])


def left_out(facts: Sequence[Fact]) -> dict[str, tuple[list[Fact], Coefficients]]:
    """By family: its rows, and the fit to all other families'."""
    families = sorted({fact.family for fact in facts})
    return {
        family: (
            [fact for fact in facts if fact.family == family],
            fit([fact for fact in facts if fact.family != family]),
        )
        for family in families
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print(f"| {' | '.join(head)} |")
    print(f"|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row)} |")
    print()


def _percent(values: np.ndarray) -> tuple[str, str]:
    off = np.abs(values)
    return f"{off.mean():.1%}", f"{off.max():.1%}"


def print_coefficients(fitted: Coefficients) -> None:
    rows = []
    for field in dataclasses.fields(Coefficients):
        if field.name in NOT_FITTED:
            continue
        new, used = getattr(fitted, field.name), getattr(FITTED, field.name)
        rows.append(
            (f"`{field.name}`", f"{getattr(PRIOR, field.name):g}", f"{new:.3g}", f"{used:g}")
        )
    _table(("coefficient", "prior", "fitted to all rows", "in memory.py"), rows)


def print_errors(groups: dict[str, tuple[list[Fact], Coefficients]]) -> None:
    rows: list[tuple[object, ...]] = []
    everything: list[np.ndarray] = []
    papers: list[np.ndarray] = []
    for family, (facts, c) in groups.items():
        own, paper = errors(facts, c), errors(facts, c, paper=True)
        everything.append(own)
        papers.append(paper)
        rows.append((family, len(facts), *_percent(own), *_percent(paper)))
    own, paper = np.concatenate(everything), np.concatenate(papers)
    rows.append(("all", len(own), *_percent(own), *_percent(paper)))
    _table(("family left out", "logs", "mean error", "worst", "Eq. (1): mean", "worst"), rows)


def print_worst(groups: dict[str, tuple[list[Fact], Coefficients]], count: int = 6) -> None:
    rows = []
    for facts, c in groups.values():
        for fact in facts:
            off = estimate(fact, c).kv_bytes / fact.kv_bytes - 1
            gib = off * fact.kv_bytes / GIB / fact.tensor_parallel
            rows.append((abs(off), fact, off, gib))
    rows.sort(key=lambda row: -row[0])
    _table(
        ("the worst", "card", "t", "vLLM", "KV error", "GiB per card"),
        [
            (f.name, f.card, f.tensor_parallel, f.options.vllm_version, f"{o:+.1%}", f"{g:+.2f}")
            for _, f, o, g in rows[:count]
        ],
    )


def print_refused(groups: dict[str, tuple[list[Fact], Coefficients]]) -> int:
    """What is said of each deployment; returns how many refused ones are called feasible."""
    wrong = 0
    rows = []
    for name, want in (("refused by vLLM", True), ("started", False)):
        said = {"feasible": 0, "tight, feasible": 0, "not feasible": 0, "Eq. (1): feasible": 0}
        for facts, c in groups.values():
            for fact in facts:
                if fact.refused is not want:
                    continue
                own, needed = estimate(fact, c), fact.options.max_model_len or 1
                feasible = is_feasible(own, needed)
                verdict = "feasible" if feasible else "not feasible"
                said["tight, feasible" if feasible and own.tight else verdict] += 1
                said["Eq. (1): feasible"] += is_feasible(estimate(fact, c, paper=True), needed)
                wrong += want and feasible
        rows.append((name, *said.values()))
    _table(("", *said), rows)
    return wrong


def print_spread(groups: dict[str, tuple[list[Fact], Coefficients]]) -> None:
    """What ``sigma`` is taken from."""
    off = np.array(
        [
            (estimate(fact, c).kv_bytes - fact.kv_bytes) / fact.tensor_parallel / GIB
            for facts, c in groups.values()
            for fact in facts
        ]
    )
    # A development version that counted other processes; cards that are not NVIDIA's.
    odd = np.array(
        [
            "dev" in fact.options.vllm_version or fact.accelerator.cuda_capability is None
            for facts, _ in groups.values()
            for fact in facts
        ]
    )
    spread, rest = (np.sqrt(np.mean(np.square(o))) for o in (off, off[~odd]))
    print(f"Left out, the KV memory of a card is off by {spread:.2f} GiB (root mean square), by")
    print(f"{rest:.2f} GiB without the {odd.sum()} logs of a development version or of another")
    print(f"maker's card, and half of them by less than {np.median(np.abs(off)):.2f} GiB.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", type=Path, metavar="FACTS.csv")
    facts = read_facts(parser.parse_args().facts)
    print_coefficients(fit(facts))
    groups = left_out(facts)
    print_errors(groups)
    print_worst(groups)
    wrong = print_refused(groups)
    print_spread(groups)
    paper = np.sqrt(np.mean(np.square(errors(facts, FITTED, paper=True))))
    print(f"Eq. (1), root mean square: {paper:.0%}.")
    kept = errors(facts, FITTED)
    print(
        f"memory.py as it is: mean error {np.abs(kept).mean():.1%}, worst {np.abs(kept).max():.1%}."
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
