"""The profile file is complete, loads as it is, and is never half written."""

import dataclasses
import math
import re
from datetime import UTC, date, datetime
from typing import Any

import pytest

from hetero_gateway.cli.reports.profile import report
from hetero_gateway.core.costs.fitting import Fit, PartFit
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.profile_file import load_profile, write_profile_file
from hetero_gateway.lab.profiler.document import ProfiledInstance, profile_document, unidentified

from .builders import fit_of, measured

GOOD = PartFit(
    constants=(1.23456e-4, 0.0, 0.0, 2e-2, 1.23456e-9),
    r2=0.98765,
    median_error=0.02,
    worst_error=0.123456,
    mean_error=0.034567,
    validation="36 cells, a fifth of them held out in turn",
    used=40,
    outliers=2,
    intervals=((1.2e-4, 1.3e-4), (0.0, 1e-4), (0.0, 0.0), (1.9e-2, 2.1e-2), (1.1e-9, 1.3e-9)),
    identified=(True, False, False, True, True),
    notes=("p2, p3 cannot be distinguished from 0",),
    eq_3_error=0.051,
)
FIT = Fit(
    prefill=GOOD,
    decode=dataclasses.replace(
        GOOD,
        constants=(1.23456e-4, 0.0, 0.0, 2e-2),
        intervals=((1.2e-4, 1.3e-4), (0.0, 1e-4), (0.0, 0.0), (1.9e-2, 2.1e-2)),
        eq_3_error=None,
        identified=(True,) * 4,
        notes=(),
        outliers=0,
        mean_error=0.05,
    ),
)


def document(fit: Fit = FIT, **source: Any) -> dict[str, Any]:
    instance = ProfiledInstance("A800-80GB-PCIe", "Llama-3-8B", 2, 123_456, 128)
    return profile_document(fit, instance, source)


def test_the_file_has_the_layout_of_a_profile_and_says_how_it_was_measured_and_how_well() -> None:
    doc = document(note="by hand", engine="vllm 0.32.0", discarded={"waited": 3})
    assert list(doc) == [
        *("gpu", "model", "tensor_parallel", "constants", "kv_capacity_tokens", "max_num_seqs"),
        "source",
    ]
    assert list(doc["constants"]) == [f"p{i}" for i in range(1, 10)]
    assert doc["constants"]["p1"] == 1.235e-4
    source = doc["source"]
    assert abs((datetime.now(UTC).date() - source.pop("date")).days) <= 1
    assert source.pop("intervals")["p4"] == [0.019, 0.021]
    fit = source.pop("fit")
    assert source == {
        "how": "measured",
        "note": "by hand",
        "engine": "vllm 0.32.0",
        "discarded": {"waited": 3},
        "error": {"prefill": 0.03457, "decode": 0.05},
        "unidentified": ["p2", "p3"],
    }
    assert fit["prefill"] == {
        "r2": 0.9877,
        "median_error": 0.02,
        "worst_error": 0.1235,
        "validation": GOOD.validation,
        "samples": 40,
        "outliers": 2,
        "eq_3_error": 0.051,
    }
    assert "eq_3_error" not in fit["decode"]


def test_the_caller_may_give_the_date_and_leave_keys_out() -> None:
    source = document(date=date(2026, 1, 2), engine=None)["source"]
    assert source["date"] == date(2026, 1, 2)
    assert "engine" not in source


def reloaded(tmp_path, doc: dict[str, Any]) -> Profile:
    write_profile_file(tmp_path / "p.yaml", doc)
    return load_profile("p.yaml", tmp_path)


def test_a_written_profile_loads_with_the_same_constants(tmp_path) -> None:
    fit = fit_of(measured())
    doc = document(fit, engine="vllm 0.32.0", block_size=16, max_model_len=4096, note="n")
    profile = reloaded(tmp_path, doc)
    assert profile.name == "A800-80GB-PCIe/Llama-3-8B/tp2"
    assert (profile.kv_capacity_tokens, profile.max_num_seqs) == (123_456, 128)
    assert dataclasses.astuple(profile.constants) == pytest.approx(
        dataclasses.astuple(fit.constants), rel=1e-3
    )
    assert profile.source["fit"]["decode"]["samples"] == fit.decode.used
    assert profile.source["engine"] == "vllm 0.32.0"


def test_an_undefined_r2_is_left_out_and_the_file_loads(tmp_path) -> None:
    fit = dataclasses.replace(FIT, prefill=dataclasses.replace(GOOD, r2=math.nan))
    assert reloaded(tmp_path, document(fit)).source["fit"]["prefill"]["r2"] is None
    assert "nan" not in report(fit)


def test_an_engine_cannot_read_the_environment_through_its_own_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HETERO_TEST_SECRET", "sesame")
    doc = document(engine="${HETERO_TEST_SECRET}") | {"model": "${HETERO_TEST_SECRET}"}
    profile = reloaded(tmp_path, doc)
    assert "sesame" not in profile.name + str(profile.source)


def test_a_folder_that_does_not_exist_is_named(tmp_path) -> None:
    path = tmp_path / "nowhere" / "p.yaml"
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: cannot be written: No such"):
        write_profile_file(path, document())


def test_the_report_has_every_constant_its_interval_and_whether_it_is_known() -> None:
    text = report(FIT)
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert set(rows) >= {f"p{i}" for i in range(1, 9)} | {"prefill", "decode"}
    assert "0.000123" in rows["p1"]
    assert "0.00012 to 0.00013" in rows["p1"]
    assert [name for name, line in rows.items() if "not identified" in line] == ["p2", "p3"]
    assert unidentified(FIT) == ["p2", "p3"]


def test_the_report_has_the_errors_the_counts_and_the_cautions() -> None:
    text = report(FIT, discarded={"waited": 3, "preempted": 1})
    prefill = next(line for line in text.splitlines() if line.startswith("│ prefill"))
    cells = [cell.strip() for cell in prefill.strip("│").split("│")]
    assert cells == ["prefill", "40", "2", "0.988", "2.0%", "3.5%", "12.3%", "5.1%"]
    assert "prefill errors: 36 cells, a fifth of them held out in turn" in text
    assert "4 samples discarded: 3 waited, 1 preempted" in text
    assert "note: p2, p3 cannot be distinguished from 0" in text
    assert "discarded" not in report(FIT)


def test_no_line_of_the_tables_is_wider_than_a_terminal() -> None:
    fit = fit_of(measured())
    tables = [line for line in report(fit).splitlines() if line[:1] in "┏┃┡│└"]
    assert len(tables) > 10
    assert max(map(len, tables)) <= 80
