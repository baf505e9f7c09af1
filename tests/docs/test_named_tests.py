"""The documents name tests for what they promise: each of them is there."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/design/reliability.md", "docs/design/security.md", "docs/architecture.md")


@cache
def functions(path: Path) -> frozenset[str]:
    """The tests of a file."""
    found = re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page):
    text = (ROOT / page).read_text("utf-8")
    named = 0
    for cell in re.split(r"[|\n]", text):
        file: Path | None = None
        for path, name in re.findall(r"(tests/[\w/]+\.py)|\b(test_\w+)\b(?!\.py)", cell):
            if path:
                file = ROOT / path
                assert file.is_file(), f"{page}: {path}"
                named += 1
            elif file is not None and f"{name}.py" not in str(file):
                # Names that stand alone are of the file that was named last.
                assert name in functions(file), f"{page}: {file.name} has no {name}"
    assert named > 5


def test_the_promises_are_numbered_and_each_has_a_test():
    page = (ROOT / "docs/design/reliability.md").read_text("utf-8")
    text = page.partition("\n## Promises\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", text, re.MULTILINE)
    assert {int(number) for number, _ in rows} >= set(range(1, 13))
    assert all("::test_" in tests for _, tests in rows)
