"""The fit of the memory model: it finds planted coefficients, and reads what logs look like."""

import csv
import dataclasses
from pathlib import Path

import pytest

from benchmarks.planner import memory
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.planner.accelerators import GIB
from hetero_gateway.planner.memory import EngineOptions, StartUp

PLANTED = dataclasses.replace(
    memory.PRIOR, mlp=1.15, logit_bytes=18.0, outside=0.4, fast_link=1.5,
    logit_bytes_before_0_17=33.0, graphs_per_layer=0.03,
)  # fmt: skip
NAMES = ("Llama-3-8B", "Llama-2-7B", "gemma-2-9b", "Qwen2.5-7B", "granite-3.1-8b", "phi-4")


def row(name: str, t: int, version: str, note: str = "", length: int = 8192) -> dict[str, object]:
    """A log of a start-up, as the planted coefficients would have it."""
    model, card = model_card(name), accelerator("H100-80GB-SXM")
    told = EngineOptions(max_model_len=length, vllm_version=version, enforce_eager=True)
    found = StartUp(model, card, t, told, PLANTED).memory()
    gib = {name: each / GIB for name, each in found.parts.items()}
    return {
        "model": name, "params_b": model.parameters / 1e9, "layers": model.layers,
        "hidden": model.hidden, "heads": model.heads, "kv_heads": model.kv_heads,
        "head_dim": model.head_dim, "dtype": "bfloat16", "weight_gib_logged": gib["weights"],
        "gpu": "H100-80G", "gpu_mem_gib": 79.19, "tp": t, "util": 0.9, "max_model_len": length,
        "kv_tokens_logged": "", "kv_gib_logged": found.kv_bytes / t / GIB,
        "vllm_version": version, "intermediate": model.intermediate, "vocab": model.vocabulary,
        "gpu_mem_nominal_gib": 80, "max_num_batched_tokens": 8192, "max_num_seqs": 1024,
        "act_peak_gib_logged": gib["activations"], "non_torch_gib_logged": gib["outside torch"],
        "cudagraph_gib_logged": PLANTED.graphs + PLANTED.graphs_per_layer * model.layers,
        "kv_bytes_per_token_instance": model.kv_token_bytes(t), "note": note,
    }  # fmt: skip


@pytest.fixture
def facts_csv(tmp_path: Path) -> Path:
    rows = [row(name, t, v) for name in NAMES for t in (1, 2) for v in ("0.15", "0.19")]
    rows.append(row("Llama-3-70B", 2, "0.19", note="refused: no room"))
    path = tmp_path / "facts.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_planted_coefficients_are_found(facts_csv: Path) -> None:
    fitted = memory.fit(memory.read_facts(facts_csv))
    # The prior, which is further off, counts as one row.
    for name in ("mlp", "logit_bytes", "logit_bytes_before_0_17", "outside", "fast_link"):
        assert getattr(fitted, name) == pytest.approx(getattr(PLANTED, name), rel=0.05), name


def test_a_family_left_out_is_predicted_by_the_others(facts_csv: Path) -> None:
    groups = memory.left_out(memory.read_facts(facts_csv))
    assert set(groups) == {"llama-3", "llama-2", "gemma", "qwen", "granite", "phi"}
    for facts, fitted in groups.values():
        started = [fact for fact in facts if not fact.refused]
        assert abs(memory.errors(started, fitted)).max() < 0.01


def test_a_model_without_a_card_is_taken_from_its_columns(facts_csv: Path) -> None:
    text = facts_csv.read_text().replace("gemma-2-9b", "somebodys-9b")
    facts_csv.write_text(text)
    (fact, *_) = [f for f in memory.read_facts(facts_csv) if f.name == "somebodys-9b"]
    known = model_card("gemma-2-9b")
    assert fact.model.tied_embeddings
    assert fact.model.parameters == known.parameters


def test_the_report_says_what_was_refused(
    facts_csv: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["memory.py", str(facts_csv)])
    assert memory.main() == 0
    out = capsys.readouterr().out
    assert "| all | 25 |" in out
    assert "| refused by vLLM | 0 | 0 | 1 |" in out
