"""What splitting requests would bring to a plan: where it pays, and where it cannot be."""

import dataclasses
from typing import Any

import pytest

from hetero_gateway.core.instances.pairs import Link
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.planner import split_plan
from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.plan import Plan, SplitVerdict
from hetero_gateway.planner.question import PlannedTransfers, Question
from hetero_gateway.planner.split_plan import backend_of, with_verdict
from hetero_gateway.planner.splitting import Transfers
from hetero_gateway.sim.alone import Alone
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths
from tests.deploy.plans import plan

V100, A100 = "V100-32GB-NVLink2", "A100-80GB-SXM"
LENGTHS = LogNormalLengths(LogNormal(1500, 0.5, 4000), LogNormal(40, 0.5, 100))
SLO = Slo(2.0, 0.035)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_plan, "_LAST", 80)
    monkeypatch.setattr(split_plan, "_REQUESTS", 80)


def asked(
    layouts: dict[str, Any], *, gbit_per_s: float = 100.0, rate_per_s: float = 8.0, **more: Any
) -> SplitVerdict:
    made: Plan = plan(layouts)
    alone = {key: Alone(3000.0, 300.0, 20.0, 0.03, "prefill") for key in made.types}
    made = dataclasses.replace(made, alone=alone, rate_per_s=rate_per_s)
    transfers = Transfers(Link(0.002, gbit_per_s * 1e9 / 8))
    backends = {name: backend_of(accelerator(name)) for name in (V100, A100)}
    question = Question(
        made.machines, made.types, LENGTHS,
        transfer=PlannedTransfers(transfers, backends), **more,
    )  # fmt: skip
    found = with_verdict(made, question).splitting
    assert found is not None
    return found


def test_it_pays_where_limits_are_tight_and_links_are_fast() -> None:
    found = asked({"box": (V100, 4, (1, 1, 1, 1))}, goals=Goals(slo=SLO, share=0.5))
    assert found.pays
    assert found.split[1] > found.unsplit[1]
    assert found.holds_per_s is not None
    assert found.holds_per_s > 4
    assert found.groups == {(V100, 1): "sm7-tp1"}
    assert all(0 < n < 4 for n in found.prefills.values())


def test_slow_links_and_other_policies_split_nothing() -> None:
    box = {"box": (V100, 4, (1, 1, 1, 1))}
    assert "brings nothing" in asked(box, gbit_per_s=0.1, goals=Goals(slo=SLO)).why_not
    assert "round-robin splits nothing" in asked(box, policy="round-robin").why_not


def test_other_backends_and_sizes_are_no_pair() -> None:
    unlike = {"old": (V100, 4, (4,)), "new": (A100, 1, (1,)), "odd": (A100, 2, (2,))}
    found = asked(unlike)
    assert "no two instances can hand over" in found.why_not
    assert found.groups == {}


def test_a_plan_that_nobody_asks_is_as_it_was() -> None:
    made = plan({"box": (V100, 4, (1, 1))})
    assert with_verdict(made, Question(made.machines, made.types, LENGTHS)) is made


def test_attention_backends_go_by_the_generation() -> None:
    names = ("V100-32GB-NVLink2", "A100-80GB-SXM", "H100-80GB-SXM", "MI300X-192GB")
    backends = [backend_of(accelerator(name)) for name in names]
    assert backends == ["sm7", "sm8", "sm8", "mi300x-192gb"]
