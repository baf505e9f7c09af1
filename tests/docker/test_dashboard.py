"""The Grafana dashboard and the alerts name metrics that exist, in PromQL that parses.

``METRICS`` is the list of the gateway's metrics; test_commands.py compares it with what a running
gateway exposes.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

PANEL_WIDTH = 24
# The engine's series and labels that panels may overlay (vLLM's own, at /metrics).
VLLM_METRICS = {
    "vllm:num_requests_running": {"backend", "model_name"},
    "vllm:num_requests_waiting": {"backend", "model_name"},
    "vllm:num_preemptions_total": {"backend", "model_name"},
    "vllm:time_to_first_token_seconds_bucket": {"backend", "model_name", "le"},
    "vllm:request_time_per_output_token_seconds_bucket": {"backend", "model_name", "le"},
    "vllm:e2e_request_latency_seconds_bucket": {"backend", "model_name", "le"},
}
# What Prometheus adds to each series: which target it was scraped from.
PROMETHEUS_LABELS = {"instance", "job"}
PROMETHEUS_METRICS = {"up": PROMETHEUS_LABELS}
# Of a gateway with batches alone (tests/serve/batches/test_shown.py).
BATCH_METRICS = {
    "hetero_gateway_batches_late": PROMETHEUS_LABELS,
    "hetero_gateway_batches_paused": PROMETHEUS_LABELS,
}


def known_series(metrics: dict[str, tuple[str, set[str]]]) -> dict[str, set[str]]:
    """Series name to label names, histograms expanded."""
    series = dict(VLLM_METRICS) | PROMETHEUS_METRICS | BATCH_METRICS
    for name, (kind, labels) in metrics.items():
        labels = labels | PROMETHEUS_LABELS
        if kind == "histogram":
            series[f"{name}_bucket"] = labels | {"le"}
            series[f"{name}_sum"] = series[f"{name}_count"] = labels
        else:
            series[name] = labels
    return series


def alert_rules(files) -> list[dict[str, Any]]:
    groups = yaml.safe_load((files.monitoring / "prometheus" / "alerts.yml").read_text("utf-8"))
    return [rule for group in groups["groups"] for rule in group["rules"]]


def selectors(expression: str) -> list[tuple[str, set[str], set[str]]]:
    """(metric, labels it is matched by, labels grouped by in the whole expression), each."""
    found: list[tuple[str, set[str], set[str]]] = []
    grouped = {
        label.strip()
        for labels in re.findall(r"\bby \(([^)]*)\)", expression)
        for label in labels.split(",")
    }

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {m.name for m in node.matchers.matchers}, grouped))
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def test_every_expression_parses_and_names_metrics_and_labels_that_exist(files, metrics):
    series = known_series(metrics)
    expressions = files.dashboard_expressions() + [rule["expr"] for rule in alert_rules(files)]
    for expression in expressions:
        found = selectors(expression)
        assert found, expression
        for name, matched, grouped in found:
            assert name in series, f"{name} in {expression}"
            assert matched <= series[name], f"labels of {name} in {expression}"
            there = set().union(*(series[other] for other, _, _ in found))
            assert grouped <= there, f"labels of {expression}"


def test_every_panel_can_be_of_one_gateway(files):
    for expression in files.dashboard_expressions():
        for name, matched, _ in selectors(expression):
            assert ("instance" in matched) == name.startswith("hetero_gateway_"), expression


def test_a_counter_is_read_as_a_rate_and_a_gauge_is_not(files, metrics):
    kinds = {name: kind for name, (kind, _) in metrics.items()}
    for expression in files.dashboard_expressions():
        for name, _, _ in selectors(expression):
            is_rate = bool(re.search(rf"(rate|increase)\({name}\b", expression))
            kind = kinds.get(name, "gauge" if name.startswith("vllm:num_requests") else "counter")
            assert is_rate == (kind != "gauge"), expression


def test_a_quantile_keeps_the_buckets(files):
    for expression in files.dashboard_expressions():
        quantiles = expression.count("histogram_quantile")
        grouped = len(re.findall(r"\bby \(le[,)]", expression))
        assert quantiles in (0, grouped), expression


def test_the_dashboard_shows_every_metric(files, metrics):
    text = " ".join(files.dashboard_expressions())
    missing = [name for name in metrics if not re.search(rf"\b{name}(_bucket)?\b", text)]
    assert missing == []


def test_a_legend_names_labels_that_the_query_keeps(files):
    for panel in files.panels():
        for target in panel["targets"]:
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            by = re.findall(r"by \(([^)]*)\)", target["expr"])
            if by:
                kept = {label.strip() for labels in by for label in labels.split(",")}
                assert named <= kept, f"{panel['title']}: {target['legendFormat']}"


def test_every_panel_has_a_unit_a_description_and_the_chosen_data_source(files):
    for panel in files.panels():
        title = panel["title"]
        assert panel["description"], title
        heatmap_unit = panel["options"].get("yAxis", {}).get("unit")
        assert panel["fieldConfig"]["defaults"].get("unit") or heatmap_unit, title
        sources = [panel["datasource"], *(t["datasource"] for t in panel["targets"])]
        assert all(s == {"type": "prometheus", "uid": "${datasource}"} for s in sources), title
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs), title


def test_panels_have_ids_of_their_own_and_do_not_overlap(files):
    taken: dict[tuple[int, int], str] = {}
    every = files.dashboard()["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    for panel in every:
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= PANEL_WIDTH
        for x in range(box["x"], box["x"] + box["w"]):
            for y in range(box["y"], box["y"] + box["h"]):
                other = taken.setdefault((x, y), panel["title"])
                assert other == panel["title"], f"{panel['title']} lies on {other}"


def test_the_rows_ask_the_questions_in_order(files):
    rows = [panel["title"] for panel in files.dashboard()["panels"] if panel["type"] == "row"]
    assert rows == [
        "Is it healthy?",
        "Is the load even?",
        "Who waits?",
        "Is it fast?",
        "Is the gateway cheap and right?",
    ]


def test_model_and_instance_can_be_chosen(files, metrics):
    variables = {v["name"]: v for v in files.dashboard()["templating"]["list"]}
    assert set(variables) == {"datasource", "gateway", "model", "backend"}
    for name in ("model", "backend"):
        query = variables[name]["query"]["query"]
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
        assert label == name
        assert label in metrics[metric][1]
        assert variables[name]["multi"]
        assert variables[name]["includeAll"]


def test_every_alert_says_what_is_wrong_and_how_bad(files):
    rules = alert_rules(files)
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["for"]


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.system
def test_prometheus_accepts_its_configuration_and_both_lists_of_targets(files, tmp_path):
    for targets in ("instances.yml", "instances.vllm.yml"):
        for name in ("prometheus.yml", "alerts.yml"):
            (tmp_path / name).write_bytes((files.monitoring / "prometheus" / name).read_bytes())
        source = files.docker / "prometheus" / targets
        (tmp_path / "instances.yml").write_bytes(source.read_bytes())
        output = promtool("check", "config", str(tmp_path / "prometheus.yml"))
        assert f"{len(alert_rules(files))} rules found" in output
        assert "WARNING" not in output


@pytest.mark.system
def test_prometheus_accepts_every_expression_of_the_dashboard(files, tmp_path):
    rules = [
        {"record": f"panel:{i}", "expr": expression}
        for i, expression in enumerate(files.dashboard_expressions())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), "utf-8")
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))


@pytest.mark.system
def test_alerts_fire_when_they_should_and_only_then(files, tmp_path):
    (tmp_path / "alerts.yml").write_bytes(
        (files.monitoring / "prometheus" / "alerts.yml").read_bytes()
    )
    cases = Path(__file__).with_name("alerts_test.yml")
    (tmp_path / cases.name).write_bytes(cases.read_bytes())
    tested = {
        case["alertname"]
        for test in yaml.safe_load(cases.read_text("utf-8"))["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert tested == {rule["alert"] for rule in alert_rules(files)}
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / cases.name))
