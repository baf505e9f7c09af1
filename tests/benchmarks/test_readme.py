"""benchmarks/README.md names every script, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_has_every_script() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    named = set(re.findall(r"python (benchmarks/\w+/\w+\.py)", table))
    scripts = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "benchmarks").glob("*/*.py")
        if '__name__ == "__main__"' in path.read_text("utf-8")
    }
    assert named == scripts - {"benchmarks/paper/reproduce.py"}  # by its own command
    assert "`scripts/reproduce`" in table


def test_the_documents_quote_scripts_that_are_there() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for script in re.findall(r"python (benchmarks/[\w/]+\.py)", page.read_text("utf-8")):
            assert (ROOT / script).is_file(), f"{page.name}: {script}"
