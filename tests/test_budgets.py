"""What a request and a reader are charged for the code, counted against tests/budgets.toml.

Nothing here depends on the machine: calls and bytecodes are counted, imports and lines are read.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "hetero_gateway"
BUDGETS = tomllib.loads((Path(__file__).parent / "budgets.toml").read_text("utf-8"))
MOST_PUBLIC_METHODS = 20


def check(found: dict[str, Any], budgets: dict[str, Any], least: float = 0.9) -> None:
    """Each within its budget, and no budget far above what is needed: it would hold nothing."""
    assert set(budgets) <= set(found)
    pairs = {name: (found[name], most) for name, most in budgets.items()}
    over = {name: pair for name, pair in pairs.items() if pair[0] > pair[1]}
    assert not over, f"more than tests/budgets.toml allows: {over}"
    slack = {name: pair for name, pair in pairs.items() if pair[0] < least * pair[1]}
    assert not slack, f"tests/budgets.toml allows far more than is used; lower it: {slack}"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="another Python has other bytecodes")
def test_a_requests_way_through_the_code() -> None:
    path = ROOT / "benchmarks" / "dataplane" / "path.py"
    command = [sys.executable, str(path), "--json", "--requests", "64"]
    printed = subprocess.run(
        [*command, "--features", *BUDGETS["features"]],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    rows = {row["feature"]: row for row in json.loads(printed.stdout)["results"]}
    check(rows["the default"], BUDGETS["request"])
    plain = rows["the default"]["bytecodes"]
    more = {name: row["bytecodes"] - plain for name, row in rows.items()}
    check(more, BUDGETS["features"], least=0.5)  # a difference of two that differ by themselves


# Imports


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports of the package, for its types alone as well."""
    graph = grimp.build_graph("hetero_gateway")
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def room_of(module: str) -> str:
    """A part of the package; of those that have rooms of their own, one of these."""
    parts = module.split(".")
    if parts[1:2] not in (["core"], ["gateway"], ["lab"], ["scaleout"], ["serve"]):
        return ".".join(parts[:2])
    is_file = not any(name.startswith(f"{'.'.join(parts[:3])}.") for name in imports())
    return ".".join(parts[: 3 - is_file])


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The sets of those that lead to each other."""
    reached = {start: _reached(start, arrows) for start in arrows}
    found: list[set[str]] = []
    for start, ends in reached.items():
        if start in ends and not any(start in circle for circle in found):
            found.append({end for end in ends if start in reached[end]})
    return found


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        new = arrows.get(ahead.pop(), set()) - seen
        seen |= new
        ahead.extend(new)
    return seen


def test_imports_do_not_lead_in_circles() -> None:
    of_modules = circles(imports())
    of_rooms: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports().items():
        of_rooms[room_of(module)] |= {room_of(name) for name in imported} - {room_of(module)}
    check(
        {
            "rooms": sum((path / "__init__.py").exists() for path in PACKAGE.iterdir()),
            "modules_in_circles": sum(map(len, of_modules)),
            "rooms_in_circles": sum(map(len, circles(of_rooms))),
        },
        BUDGETS["imports"],
    )


# Classes and lines


def test_classes_are_no_larger_than_can_be_held_in_mind() -> None:
    names: Counter[str] = Counter()
    large = 0
    for path in sources():
        # As the formatter writes them.
        _, *classes = re.split(r"^class ", path.read_text("utf-8"), flags=re.MULTILINE)
        for text in classes:
            name = re.match(r"\w+", text)
            assert name is not None
            names[name[0]] += not name[0].startswith("_")
            inside = re.split(r"\n(?=\S)", text, maxsplit=1)[0]
            public = re.findall(r"^    (?:async )?def [a-z]\w*", inside, flags=re.MULTILINE)
            large += len(public) > MOST_PUBLIC_METHODS
    twice = sum(count > 1 for count in names.values())
    check({"with_many_public_methods": large, "names_used_twice": twice}, BUDGETS["classes"])


def test_rooms_are_no_longer_than_they_need_to_be() -> None:
    lines: Counter[str] = Counter()
    for path in sources():
        count = len(path.read_text("utf-8").splitlines())
        lines[path.relative_to(PACKAGE).parts[0].removesuffix(".py")] += count
        lines["all"] += count
    check(lines, BUDGETS["lines"])
    tests = sum(len(p.read_text("utf-8").splitlines()) for p in (ROOT / "tests").rglob("*.py"))
    check({"all": tests}, BUDGETS["tests"])


def test_the_documentation_is_no_longer_than_it_needs_to_be() -> None:
    folders = {name: (ROOT / "docs" / name).glob("*.md") for name in BUDGETS["words"]}
    words = {
        name: sum(len(p.read_text("utf-8").split()) for p in folders[name]) for name in folders
    }
    check(words, BUDGETS["words"])


def sources() -> list[Path]:
    """All that people have written."""
    return [path for path in PACKAGE.rglob("*.py") if not path.name.endswith("_pb2.py")]
