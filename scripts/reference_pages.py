"""The pages of docs/reference that are made from the code; scripts/reference runs it.

What people wrote in a page stays: a table is replaced between its two marks only.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from starlette.routing import Route

from hetero_gateway.cli import COMMANDS
from hetero_gateway.cli.arguments import add_command
from hetero_gateway.core.histogram import Histogram
from hetero_gateway.core.sharing.exchange import Mode
from hetero_gateway.engines.vllm.paths import (
    ENGINE_CALLS,
    RESPONSES,
    TOKENIZER_INFO,
    WORK_BY_PATH,
    Work,
    asked_at,
)
from hetero_gateway.files.client_keys import KeyConfig, KeysFile
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.records.client_metrics import client_families
from hetero_gateway.gateway.records.exposition import Family
from hetero_gateway.gateway.records.families import batch_families, following_families
from hetero_gateway.gateway.records.metrics import DECISION_BOUNDS_S, Metrics
from hetero_gateway.serve.app import create_app

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
MADE = "<!-- Made by scripts/reference; edits are lost. -->"
WORK = {
    Work.GENERATE: "prefill and decode",
    Work.PREFILL: "prefill only",
    Work.LIGHT: "none: it takes no step of the engine",
}
ABOUT_METRICS = """\
What `/metrics` exposes, beside prometheus-client's own series of the process (`process_*`,
`python_*`). `backend` is the id of an instance; `instance` is left to Prometheus, which names by it
the gateway that was scraped. `model` is a name that instances serve; where a request reached none,
`backend` is empty. Counters are there, at 0, from the start. Buckets of times are among vLLM's own,
so that panels overlay. A client that takes gzip gets it. With hundreds of instances,
`metrics.per_backend: basic` leaves out what is needed least of each."""
_ABOUT_A_RESPONSE = ("", "/cancel", "/input_items")


def commands_page() -> str:
    """Every command with its arguments, from the parsers."""
    root = argparse.ArgumentParser(prog="hetero-gateway")
    subparsers = root.add_subparsers(metavar="COMMAND")
    for name in COMMANDS:
        add_command(subparsers, name)
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    lines = [
        "# Commands",
        "",
        MADE,
        "",
        "`hetero-gateway COMMAND --help` prints the same. Exit codes: 0 success, 1 a failure,",
        "2 a usage or configuration error, which is one line that names the cause.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`{name}`](#{name}) | {helps[name]} |" for name in COMMANDS),
    ]
    for name in COMMANDS:
        lines += ["", *_command(subparsers.choices[name], level=2)]
    return "\n".join(lines) + "\n"


def _command(parser: argparse.ArgumentParser, level: int) -> list[str]:
    title = parser.prog.removeprefix("hetero-gateway ")
    lines = ["#" * level + f" {title}", "", _text(parser.description or "")]
    rows: dict[str, list[str]] = {}
    nested: list[argparse.ArgumentParser] = []
    for group in parser._action_groups:
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                nested += action.choices.values()
            elif action.help not in (argparse.SUPPRESS, "show this help message and exit"):
                heading = group.title or ""
                kind = "" if heading in ("options", "positional arguments") else heading
                rows.setdefault(kind, []).append(_row(action))
    for kind, cells in rows.items():
        heads = f"| {kind or 'argument'} | meaning |"
        lines += ["", heads, "|---|---|", *cells]
    if parser.epilog:
        lines += ["", *_epilog(parser.epilog)]
    for each in nested:
        lines += ["", *_command(each, level + 1)]
    return lines


def _row(action: argparse.Action) -> str:
    metavar = action.metavar
    if isinstance(metavar, tuple):
        value = " ".join(metavar)
    elif action.choices is not None:
        value = metavar or "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = metavar or action.dest.upper()
    if action.nargs == 0:
        value = ""
    elif action.nargs == "+":
        value = f"{value} ..."
    names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
    text = (action.help or "") % {**vars(action), "prog": "hetero-gateway"}
    if action.required and action.option_strings:
        text = f"{text}; required" if text else "required"
    shown = ", ".join(f"`{name}`" for name in names)
    return f"| {shown} | {_text(text)} |"


def _text(text: str) -> str:
    """One paragraph, in which what Markdown would take for markup is plain."""
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|").replace("<", "&lt;")


def _epilog(text: str) -> list[str]:
    """Examples as code, the rest as paragraphs."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        heading, _, rest = block.partition("\n")
        if match := re.match(r"(examples?|then, .*):\s*(.*)$", heading):
            code = [match[2]] if match[2] else []
            code += [line.removeprefix("  ") for line in rest.splitlines()]
            lines += [f"{match[1].capitalize()}:", "", "```text", *code, "```", ""]
        else:
            lines += [_text(block), ""]
    return lines[:-1]


def paths_of_the_gateway() -> list[str]:
    """The rows of what the gateway answers itself: control paths and /admin."""
    instance = {"id": "a", "base_url": "http://127.0.0.1:8001"}
    with tempfile.TemporaryDirectory() as folder:
        told = {"instances": [instance], "batches": {"directory": folder}}
        control = create_app(GatewayConfig.model_validate(told)).control
    found: dict[tuple[str, str], list[str]] = {}
    routes = [(each.path, each.methods, each.answer) for each in control.paths]
    of_api = control.make_api().state.routes
    routes += [(r.path, r.methods, r.endpoint) for r in of_api if isinstance(r, Route)]
    for template, every, answer in routes:
        path = re.sub(r":path}", "}", template)
        methods = sorted({*(every or ())} - {"HEAD"})
        first = (inspect.getdoc(answer) or "").split("\n\n")[0]
        if not first:
            raise SystemExit(f"{path}: its function has no docstring, which is its description")
        found.setdefault((path, _text(first)), []).extend(methods)
    return [
        f"| {', '.join(dict.fromkeys(methods))} | `{path}` | {text} |"
        for (path, text), methods in sorted(found.items())
    ]


def paths_of_engines() -> list[str]:
    """The rows of what is sent to an instance."""
    rows = [f"| POST | `{path}` | {WORK[work]} |" for path, work in WORK_BY_PATH.items()]
    for path in (TOKENIZER_INFO, *(f"{RESPONSES}/{{id}}{end}" for end in _ABOUT_A_RESPONSE)):
        asked = asked_at(path.replace("{id}", "resp_1"))
        assert asked is not None
        where = (
            "sent to the instance that made the response" if asked.response_id else "any can say"
        )
        rows.append(f"| {', '.join(asked.methods)} | `{path}` | none: {where} |")
    return sorted(rows, key=lambda row: row.split("`")[1])


def calls_of_engines() -> list[str]:
    """The rows of what concerns an engine rather than a request."""
    return [f"| {method} | `{path}` |" for path, method in sorted(ENGINE_CALLS.items())]


def http_page(text: str) -> str:
    """``text`` with its tables made anew."""
    text = _replace(text, "sent on", "| method | path | work |", paths_of_engines())
    text = _replace(text, "engine calls", "| method | path |", calls_of_engines())
    heads = "| method | path | what it answers |"
    return _replace(text, "gateway", heads, paths_of_the_gateway())


def _replace(text: str, name: str, heads: str, rows: list[str]) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"http.md: there is no {begin} … {end}")
    table = [heads, re.sub(r"[^|]+", "---", heads), *rows]
    return "\n".join([head + begin, "", *table, "", end + tail])


class _Placements:
    """What others have sent, of which nothing is known."""

    said_bytes = 0

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


class _View:
    """A view of other gateways in which nothing has happened."""

    mode = Mode.LOCAL
    replicas = unmatched = 0

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.news: Counter[str] = Counter()
        self.exchange_s = Histogram(DECISION_BOUNDS_S)
        self.placements = _Placements()

    def age_s(self) -> float | None:
        return None


def metric_families() -> list[Family]:
    """Every family that a gateway can expose: with workers, others beside it, and clients."""
    metrics = Metrics("finish-time", list)
    metrics.sharing, metrics.workers = _View(), lambda: 0
    metrics.prefix_index = lambda: (0, 0)
    metrics.kv_events = {}
    key = KeyConfig.model_validate({"name": "a", "hash": "sha256:" + "0" * 64})
    admission = Admission(None, KeysFile(keys=[key]))
    metrics.clients = lambda: client_families(admission, 1, metrics.models)
    metrics.following = lambda: following_families((), 0)
    metrics.batches = lambda: batch_families(0, 0, False, {}, {}, {})
    found = {family.name: family for part in metrics.parts() for family in part}
    return sorted(found.values(), key=lambda family: family.name)


def metrics_page() -> str:
    """Every metric, from what /metrics makes."""
    lines = [
        "# Metrics",
        "",
        MADE,
        "",
        ABOUT_METRICS,
        "",
        "| metric | type | labels | what |",
        "|---|---|---|---|",
    ]
    for family in metric_families():
        name = family.name + ("_total" if family.kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in family.labels)
        text = _text(family.documentation)
        if not text:
            raise SystemExit(f"{name}: it has no description")
        lines.append(f"| `{name}` | {family.kind} | {labels} | {text} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    http = FOLDER / "http.md"
    return {
        FOLDER / "commands.md": commands_page(),
        FOLDER / "metrics.md": metrics_page(),
        http: http_page(http.read_text("utf-8")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if one is old")
    check = parser.parse_args().check
    old = {
        path: text
        for path, text in pages().items()
        if not path.is_file() or path.read_text("utf-8") != text
    }
    for path, text in old.items():
        if not check:
            path.write_text(text, "utf-8")
        print(f"docs/reference/{path.name}: {'is out of date' if check else 'written'}")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
