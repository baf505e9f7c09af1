"""The pages of ``bench --report`` and ``profile --report``: whole, right and self-contained."""

from typing import Any

import numpy as np
import pytest

from hetero_gateway.cli.reports import bench, profile
from hetero_gateway.core.costs.fitting import fit
from hetero_gateway.lab.load.result import RequestRecord, summarise
from hetero_gateway.lab.profiler.samples import write_csv
from tests.fakes.pages import EVIL, Page
from tests.lab.profiler.builders import measured

FLAGS = ("--gpu", "A100", "--model", "m", "--kv-capacity-tokens", "10000")


def record(index: int, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "index": index,
        "due_s": 10.0 + index,
        "sent_s": 10.0 + index,
        "first_s": 10.5 + index,
        "end_s": 12.5 + index,
        "input_tokens": 100,
        "output_tokens": 40,
        "instance": f"i{index % 2}",
        "error": None,
    }
    return RequestRecord(**values | changes)


def bench_page(records: list[RequestRecord], model: str = "m") -> str:
    html = bench.report(summarise(records), records, "http://x", model).html
    assert html is not None
    return html()


@pytest.mark.usefixtures("short_library")
@pytest.mark.parametrize("page", ["bench", "profile"])
def test_a_page_is_whole_and_fetches_nothing(page):
    samples = measured()
    document = {"gpu": EVIL, "model": EVIL, "tensor_parallel": 1, "kv_capacity_tokens": 9}
    text = (
        bench_page([record(0, instance=EVIL), record(1)], EVIL)
        if page == "bench"
        else profile.render(fit(samples, rng=np.random.default_rng(0)), samples, document)
    )
    parsed = Page(text)
    assert not parsed.tags() & {"link", "img", "iframe", "object", "base", "form"}
    assert EVIL in parsed.json("document").values()
    figures = parsed.json("figures")
    drawn = {attrs.get("id") for tag, attrs in parsed.elements if tag == "div"} - {None}
    assert drawn == set(figures)


def test_every_output_token_is_in_the_throughput_over_the_run():
    records = [record(i) for i in range(20)]
    records += [record(20, first_s=None, end_s=33.0), record(21, error="timeout")]
    figure = bench.throughput_figure(records)
    width_s = figure["data"][0]["x"][1] - figure["data"][0]["x"][0]
    by_name = {trace["name"]: sum(trace["y"]) * width_s for trace in figure["data"]}
    assert sum(by_name.values()) == pytest.approx(21 * 40)
    assert by_name["i0"] == pytest.approx(11 * 40)


def test_many_instances_are_one_area():
    figure = bench.throughput_figure([record(i, instance=f"i{i}") for i in range(30)])
    assert [trace["name"] for trace in figure["data"]] == ["all instances"]


@pytest.mark.usefixtures("short_library")
def test_a_run_in_which_all_failed_has_a_page_too():
    parsed = Page(bench_page([record(0, error="connect", first_s=None)]))
    assert parsed.json("document")["errors"] == 1


def test_times_are_drawn_as_they_were():
    figure = bench.latency_figure([record(i) for i in range(3)])
    ttft, latency = figure["data"]
    assert set(ttft["x"]) == {0.5}
    assert set(latency["x"]) == {2.5}


def test_each_sample_is_a_point_at_its_measured_and_fitted_time():
    samples = measured()
    figure = profile.prefill_figure(samples, fit(samples, rng=np.random.default_rng(0)))
    points = [trace for trace in figure["data"] if trace["mode"] == "markers"]
    assert sum(len(trace["x"]) for trace in points) == len(samples)
    for trace in points:
        assert trace["y"] == pytest.approx(trace["x"], rel=0.1)  # of 2 % noise


def test_profile_writes_its_page_beside_the_file(tmp_path, run):
    write_csv(tmp_path / "s.csv", measured(noise=1e-3))
    page = tmp_path / "p.html"
    words = ("-o", tmp_path / "p.yaml", "--report", page)
    said = run("profile", "--from", tmp_path / "s.csv", *words, *FLAGS)
    assert f"wrote {page}" in said.err
    assert Page(page.read_text("utf-8")).json("document")["constants"]["p1"] > 0


def test_a_page_that_cannot_be_written_is_found_before_any_work(tmp_path, error):
    gone = ("--report", tmp_path / "gone" / "p.html")
    profile = ("profile", "--from", "nowhere.csv", "-o", tmp_path / "p.yaml", *FLAGS)
    for words in (profile, ("bench", "http://127.0.0.1:1")):
        assert "--report: " in error(*words, *gone)
