"""The plan's tables: what a narrow terminal keeps, and what is said once."""

import dataclasses
import io

import pytest
from rich.console import Console

from hetero_gateway.cli.reports.plan import (
    best_rows,
    headline,
    legend,
    names,
    once,
    print_plan,
    splitting_lines,
    tokens,
    unfit_lines,
)
from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.plan import Machine, Plan, Unfit
from hetero_gateway.planner.question import Question
from hetero_gateway.planner.search import search
from tests.deploy.plans import ONE_MACHINE, SPLITTING
from tests.fakes.planning import LENGTHS, compiled_plans, types_of  # noqa: F401 - used by all


def plan(*machines: Machine, goals: Goals | None = None) -> Plan:
    accelerators = {m.accelerator for m in machines}
    return search(
        Question(
            machines,
            types_of(*sorted(accelerators)),
            LENGTHS,
            goals or Goals(),
            policy="capacity-weighted",
            requests=400,
        )
    )


@pytest.fixture(scope="module")
def one_kind() -> Plan:
    return plan(Machine("m", "gpu", 4))


@pytest.fixture(scope="module")
def two_kinds() -> Plan:
    machines = [Machine(f"a{i}", "gpu", 4) for i in range(3)]
    return plan(*machines, Machine("b", "other", 2, 1.0))


def printed(found: Plan, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, highlight=False, markup=False)
    print_plan(found, console)
    return out.getvalue()


def table_widths(text: str) -> set[int]:
    return {len(line) for line in text.splitlines() if line.startswith(("│", "┡", "└"))}


def test_a_wide_terminal_has_the_reasons_in_the_table(one_kind):
    text = printed(one_kind, 200)
    assert "why not" in text
    assert "as printed" in text


@pytest.mark.parametrize("width", [60, 80, 110])
def test_a_narrow_terminal_keeps_whole_figures_and_has_the_reasons_below(one_kind, width):
    text = printed(one_kind, width)
    assert max(table_widths(text)) <= width
    assert "why not" not in text
    for candidate in one_kind.candidates[1:]:
        assert candidate.why_not.split(";")[0] in text
    assert tokens(one_kind.best.simulated.tokens_per_s if one_kind.best.simulated else 0) in text


def test_candidates_of_several_kinds_are_told_by_what_differs(two_kinds):
    told = names(two_kinds)
    assert told[0] == "best"
    assert len(set(told)) == len(told)
    for name, candidate in zip(told[1:], two_kinds.candidates[1:], strict=True):
        changed = {
            m.accelerator
            for m in two_kinds.machines
            if candidate.layouts[m.id] != two_kinds.best.layouts[m.id]
        }
        assert all((f"{a}:" in name) == (a in changed) for a in ("gpu", "other"))


def test_equal_machines_are_one_row(two_kinds):
    first = [row[0] for row in best_rows(two_kinds) if row[0]]
    assert first == ["a0 … a2 (3)", "b"]


def test_the_headline_and_the_legend_have_the_plans_own_figures(one_kind):
    assert f"{one_kind.best.accelerators} accelerators" in headline(one_kind)
    assert "◆" in legend(one_kind)


def test_what_cannot_be_deployed_is_one_line_for_one_reason():
    lines = unfit_lines(
        [
            Unfit("gpu", 3, "32 heads do not divide by 3"),
            Unfit("gpu", 5, "32 heads do not divide by 5"),
            Unfit("gpu", 1, "too small", 2**31, ("fp8 weights", "more t")),
            Unfit("other", 3, "32 heads do not divide by 3"),
        ]
    )
    assert lines == [
        "gpu tp3, tp5: 32 heads do not divide by t",
        "gpu tp1: too small, 2.0 GiB an accelerator too little; would help: fp8 weights, more t",
        "other tp3: 32 heads do not divide by 3",
    ]


def test_a_cause_is_told_once():
    told: set[str] = set()
    assert once("-1%; tp2: little KV", told) == "-1%; tp2: little KV"
    assert once("-2%; tp2: little KV", told) == "-2%; tp2: as above"
    assert once("-2%; tp4: little KV", told) == "-2%; tp4: little KV"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "–"),
        (512.4, "512"),
        (9999.0, "9999"),
        (12_345.0, "12.3k"),
        (123_456.0, "123k"),
        (12_345_678.0, "12.3M"),
    ],
)
def test_tokens_are_told_in_three_figures_or_so(value, text):
    assert tokens(value) == text


def test_what_splitting_brings_is_said_with_its_flags():
    lines = splitting_lines(dataclasses.replace(SPLITTING, rate_per_s=10.0))
    assert "pays: at 10.0 requests/s a mean latency of 1.50 s in place of 2.00 s" in lines[0]
    assert "95.0% of the requests within the limits in place of 80.0%; 12.0 requests" in lines[0]
    assert lines[1].endswith(
        "3× V100-32GB-NVLink2 tp1 (group sm7-tp1): 1 for prompts, 2 for answers"
    )
    assert "--kv-transfer-config" in lines[2]
    assert splitting_lines(ONE_MACHINE) == []
