"""What a plan costs: the files are there, and what is made beside them is a trace in order."""

from pathlib import Path

from benchmarks.planner import cost
from hetero_gateway.files.plan_request import load_requests


def test_the_case_with_prefixes_is_planned_in_order(tmp_path):
    _, cluster, _, trace = cost.arguments(cost.PREFIXES, tmp_path, requests=60)
    (request,) = load_requests(Path(cluster), {}, requests=Path(trace), profiles=[])
    assert request.question.in_order
    assert sum(machine.count for machine in request.question.machines) == 5


def test_the_shipped_files_are_there_and_a_plan_costs_something(tmp_path, monkeypatch, capsys):
    assert all(Path(cost.arguments(name, tmp_path)[1]).exists() for name in cost.FILES)
    assert cost.cpu_s(["--help"]) > 0
    monkeypatch.setattr(cost, "cpu_s", lambda words: 7.0)
    assert cost.main(["--rounds", "1", "--only", "prefixes"]) == 0
    assert cost.main(["--rounds", "1", "--only", "plan-paper"]) == 1
    assert "| plan-paper | 7.0 | 5 |" in capsys.readouterr().out
