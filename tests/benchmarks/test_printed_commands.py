"""Every command that a document prints: its script imports, and its arguments are taken.

What it prints is not looked at: that a benchmark runs to its end at a tiny size, its own tests
say. The arguments are those of the page, as its reader would copy them.
"""

import argparse
import asyncio
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.planner import search
from hetero_gateway.cli import COMMANDS, parse
from tests.fakes.planning import short_runs  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md")))
# What stands for something else, and what is left out: choices, ellipses, comments.
LEFT_OUT = re.compile(r"\[[^\]]*\]|(?<=\s)\.\.\.|(?<=\s)#.*|\d?>.*|<.*|;(?:\s.*|$)|\|.*|&&.*|&\s*$")


def printed(program: str, *, inline: bool = True) -> Iterator[tuple[str, str]]:
    """(page, command) of all that begin so, in blocks and, ``inline``, in the text."""
    for page in PAGES:
        text = page.read_text("utf-8").replace("\\\n", " ")
        spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
        lines = [line.strip() for line in text.splitlines() if "`" not in line]
        for line in (*(spans if inline else ()), *lines):
            if (at := re.match(rf"(?:\$ |PYTHONPATH=\. )?({program}.*)", line)) is not None:
                yield str(page.relative_to(ROOT)), LEFT_OUT.sub("", at[1]).strip()


class Parsed(Exception):
    """Its arguments were taken: that is as far as it goes."""


def start(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script until its arguments are read; one without any is only imported."""
    script = importlib.import_module(module)
    source = inspect.getsource(script)
    if "parse_args(" not in source:
        assert not words, f"{module} takes no arguments"
        return
    real = argparse.ArgumentParser.parse_args

    def parse_args(parser, args=None, namespace=None):
        real(parser, words, namespace)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", [module, *words])
        with pytest.raises(Parsed):
            _run(script)


def _run(script: ModuleType) -> None:
    running = script.main()
    if inspect.iscoroutine(running):
        asyncio.run(running)


BENCHMARKS = sorted({command for _, command in printed(r"python (?:-m )?benchmarks")})


def test_the_pages_print_commands():
    assert len(BENCHMARKS) > 80


@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_printed_benchmark_starts(command, monkeypatch):
    words = shlex.split(command.replace("$kind", "chat"))[1:]
    words = words[1:] if words[0] == "-m" else words
    module = words[0].removesuffix(".py").replace("/", ".")
    start(module, words[1:], monkeypatch)


def test_a_printed_command_line_is_taken():
    wrong = []
    program = r"hetero-gateway (?:" + "|".join(COMMANDS) + ")"
    for page, command in sorted(set(printed(program, inline=False))):
        if page == "docs/reference/commands.md":
            continue  # made from the parsers, with a word on each
        try:
            parse(shlex.split(command)[1:])
        except SystemExit as ended:
            if ended.code:
                wrong.append(f"{page}: {command}")
    assert not wrong


def test_a_plan_of_many_machines_is_made_for_every_goal(capsys):
    search.plan_large(["L40S-48GB"], copies=1, count=1, rate_per_s=1.0, requests=100)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *("throughput", "cost", "fewest", "fewest, TTFT p99 ≤ 2 s and TPOT p99 ≤ 50 ms"),
    ]
