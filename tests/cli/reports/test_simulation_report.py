"""The page of ``simulate --report``: whole, self-contained, and without markup from files."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest

from hetero_gateway.cli.reports import page, simulation
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import ConfigError
from hetero_gateway.sim import alone
from hetero_gateway.sim.experiment import Experiment, Rate, compare, measure_bound, mix_moments
from hetero_gateway.sim.result import Cell
from hetero_gateway.sim.workload import Fault, FaultKind, TraceLengths
from tests.fakes.cluster import FakeSimulate, profile, simulated
from tests.fakes.pages import EVIL, LIBRARY, Page


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound takes little time."""
    monkeypatch.setattr("hetero_gateway.sim.experiment._BOUND_REQUESTS", 600)
    monkeypatch.setattr(alone, "_BATCHES", 2)


def experiment(**changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "instances": (simulated("fast", 0.01), simulated("slow", 0.04)),
        "lengths": TraceLengths(np.array([10, 20, 30]), np.array([5, 6, 7])),
        "count": 30,
        "slo": Slo(2.0, 0.2),
    }
    return Experiment(**values | changes)


def cells_of(
    made: Experiment, policies: tuple[str, ...] = ("round-robin", "min-max")
) -> list[Cell]:
    fake = FakeSimulate()
    bound = measure_bound(made)
    rates = [Rate(4.0, 0.5), Rate(math.inf)]
    return compare(made, policies, rates, (0, 1, 2), bound, simulate=fake)


def render(made: Experiment, cells: list[Cell], name: str = "cluster.yaml") -> str:
    bound, moments = measure_bound(made), mix_moments(made.lengths)
    found = simulation.PolicyComparison(name, made, bound, moments, cells, {})
    html = simulation.report(found).html
    assert html is not None
    return html()


# The page


def test_the_page_is_whole_and_its_library_stands_in_it():
    made = experiment()
    page = render(made, cells_of(made))
    assert "{{" not in page.split('<script type="application/json"')[0]
    parsed = Page(page)
    assert len(parsed.text["script"]) > 1_000_000
    assert {"h1", "table", "select", "button", "script"} <= parsed.tags()


@pytest.mark.usefixtures("short_library")
def test_nothing_is_fetched_from_elsewhere():
    made = experiment()
    page = render(made, cells_of(made))
    parsed = Page(page)
    assert not parsed.tags() & {"link", "img", "iframe", "object", "base", "form"}
    assert not any("src" in attrs or "href" in attrs for _, attrs in parsed.elements)
    assert not re.search(r"@import|url\(|https?:", page)
    (policy,) = (
        attrs["content"] or ""
        for tag, attrs in parsed.elements
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "unsafe-eval" not in policy


@pytest.mark.usefixtures("short_library")
def test_text_from_files_stays_text():
    evil = profile(gpu=EVIL, model=EVIL, source={"how": EVIL, "note": EVIL})
    instance = dataclasses.replace(
        simulated("x"), instance_id=InstanceId(EVIL), profile=evil, believed=evil
    )
    made = experiment(instances=(instance, simulated("b")), faults=(Fault(0, FaultKind.DEAD, 1.0),))
    page = render(made, cells_of(made), name=EVIL + ".yaml")
    parsed = Page(page)
    assert "img" not in parsed.tags()
    assert page.count(LIBRARY) == 1
    assert any("onerror" in text for text in parsed.visible)
    # And in the figures: plotly takes tags in its labels, so they are escaped there once more.
    figures = parsed.json("figures")
    names = [trace["name"] for trace in figures["rates"][0]["figures"]["completion"]["data"]]
    assert names[0].startswith("&lt;/script&gt;&lt;img")
    document = parsed.json("document")
    assert document["results"][0]["instances"][0]["id"] == EVIL


@pytest.mark.usefixtures("short_library")
def test_the_tables_say_what_was_simulated():
    believed = profile(0.04)
    wrong = dataclasses.replace(simulated("wrong", 0.02), believed=believed)
    unknown = dataclasses.replace(simulated("unknown", 0.05), believed=None)
    made = experiment(
        instances=(wrong, unknown), faults=(Fault(1, FaultKind.SLOW, 3.0, factor=2.5),)
    )
    text = " ".join(Page(render(made, cells_of(made))).visible)
    for word in ("wrong", "unknown", "× 2", "unprofiled", "Faults", "slow", "2.5", "the end"):
        assert word in text
    assert "4 requests/s (50% of the bound)" in text
    assert "all at once" in text
    plain = experiment()
    assert "Faults" not in " ".join(Page(render(plain, cells_of(plain))).visible)


@pytest.mark.usefixtures("short_library")
def test_runs_in_which_nothing_finished_are_gaps_not_broken_json():
    made = experiment()
    fake = FakeSimulate(refuse=range(30))
    cells = compare(made, ["min-max"], [Rate(5.0)], (0,), measure_bound(made), simulate=fake)
    figures = Page(render(made, cells)).json("figures")
    assert figures["rates"][0]["figures"]["latency"]["data"][0]["x"] == []


# The figures


def test_plotly_accepts_every_figure():
    from plotly.graph_objects import Figure

    made = experiment()
    cells = cells_of(made)
    for figure in (
        simulation.throughput_figure(cells, 100.0),
        simulation.completion_figure(cells[:2]),
        simulation.latency_figure(cells[:2], ["round-robin", "min-max"]),
    ):
        assert len(Figure(figure).data) == len(figure["data"]) > 0


def test_the_throughput_figure_has_each_policy_at_each_rate_and_the_bound():
    cells = cells_of(experiment())
    figure = simulation.throughput_figure(cells, 123.0)
    assert [trace["name"] for trace in figure["data"]] == ["round-robin", "min-max", "bound"]
    bars = figure["data"][0]
    assert bars["x"] == ["4 requests/s (50% of the bound)", "all at once"]
    means = [c.throughput_tokens_per_s.mean for c in cells if c.policy == "round-robin"]
    assert bars["y"] == means
    assert figure["data"][-1]["y"] == [123.0, 123.0]


def test_the_completion_figure_has_each_instance_or_the_first_and_the_last_of_many():
    few = simulation.completion_figure(cells_of(experiment())[:2])
    assert [trace["name"] for trace in few["data"]] == ["fast", "slow"]
    assert few["data"][0]["y"][0] < few["data"][1]["y"][0]
    many = experiment(instances=tuple(simulated(f"i{n}", 0.01 + n % 2 / 100) for n in range(25)))
    figure = simulation.completion_figure(cells_of(many)[:2])
    first, last = figure["data"]
    assert (first["name"], last["name"]) == ("first to finish", "last to finish")
    assert all(a < b for a, b in zip(first["y"], last["y"], strict=True))


def test_a_policy_has_one_colour_in_every_figure():
    cells = cells_of(experiment())
    bars = simulation.throughput_figure(cells, 1.0)["data"]
    lines = simulation.latency_figure(cells[:2], ["round-robin", "min-max"])["data"]
    assert [b["marker"]["color"] for b in bars[:2]] == [t["line"]["color"] for t in lines]


# The command


def test_the_report_is_written_and_the_table_printed(tmp_path, run):
    cluster = tmp_path / "c.yaml"
    cluster.write_text(
        "instances: [{profile: V100-32GB-NVLink2/Llama-3-8B/tp4, count: 2}]\n"
        "workload: {output: {median: 8, sigma: 0.5, max: 32}}\n",
        encoding="utf-8",
    )
    target = tmp_path / "report.html"
    flags = ("--policy", "round-robin", "--rate", "9", "--count", "20", "--seeds", "1")
    out, err = run("simulate", "-c", cluster, *flags, "--report", target)
    assert "round-robin" in out
    assert f"wrote {target}" in err
    document = Page(target.read_text(encoding="utf-8")).json("document")
    assert document["results"][0]["policy"] == "round-robin"


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="the path is a folder"):
        page.check_can_write(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        page.write(tmp_path, "page")
