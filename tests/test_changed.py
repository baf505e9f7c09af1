"""Which tests run for which change, on a small repository made for it."""

import subprocess
from pathlib import Path

import pytest

from scripts.changed_tests import changed_paths, package_imports, select

IMPORTS = {
    "hetero_gateway": set(),
    "hetero_gateway.low": set(),
    "hetero_gateway.high": {"hetero_gateway.low"},
    "hetero_gateway.room": set(),
    "hetero_gateway.room.inside": set(),
    "hetero_gateway.cli": set(),
    "hetero_gateway.cli.serve": {"hetero_gateway.high"},
    "hetero_gateway.__main__": {"hetero_gateway.cli"},
}
FILES = {
    "tests/conftest.py": "",
    "tests/fakes/helper.py": "from hetero_gateway.low import thing",
    "tests/a/conftest.py": "",
    "tests/a/test_low.py": "from hetero_gateway.low import thing",
    "tests/a/test_high.py": "import hetero_gateway.high",
    "tests/b/test_inside.py": "from hetero_gateway.room.inside import thing",
    "tests/b/test_helped.py": "from tests.fakes import helper",
    "tests/b/test_patched.py": "def test(m):\n    m.setattr('hetero_gateway.high.LIMIT_S', 1)",
    "tests/b/test_command.py": "WORDS = ['-m', 'hetero_gateway', 'serve']",
    "tests/b/test_text.py": "PATH = ROOT / 'docs' / 'page.md'",
    "tests/b/test_page.py": "ATTRIBUTES = {'src', 'href'}",
    "tests/b/test_sources.py": "FOLDER = ROOT / 'src' / 'hetero_gateway'",
    "tests/b/data.json": "",
}
ALL = sorted(path for path in FILES if Path(path).name.startswith("test_"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        # Directly or indirectly, by a helper, a string or a command.
        ("src/hetero_gateway/low.py", "low high helped patched command sources"),
        ("src/hetero_gateway/high.py", "high patched command sources"),
        ("src/hetero_gateway/cli/serve.py", "command sources"),
        ("src/hetero_gateway/room/__init__.py", "inside sources"),
        ("src/hetero_gateway/room/table.csv", "inside sources"),
        ("tests/fakes/helper.py", "helped"),
        ("tests/a/test_low.py", "low"),
        ("tests/a/conftest.py", "low high"),
        ("tests/b/data.json", "inside helped patched command text page sources"),
        ("docs/architecture.md", "text"),
        ("LICENSE", ""),
    ],
)
def test_who_reaches_what_has_changed_runs(root: Path, changed: str, names: str) -> None:
    found = select(root, {changed}, IMPORTS)
    assert {Path(path).stem.removeprefix("test_") for path in found} == set(names.split())
    assert set(found) <= set(ALL)


@pytest.mark.parametrize("path", ["pyproject.toml", "tests/conftest.py", "tests/budgets.toml"])
def test_what_all_stand_on_runs_everything(root: Path, path: str) -> None:
    assert select(root, {path, "LICENSE"}, IMPORTS) == ["tests"]


def test_nothing_changed_runs_nothing(root: Path) -> None:
    assert select(root, set(), IMPORTS) == []


def test_changed_are_modified_removed_and_new_files_but_not_ignored_ones(root: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)

    git("init")
    (root / ".gitignore").write_text("*.log\n", "utf-8")
    git("add", ".")
    git("commit", "-m", "first")
    assert changed_paths(root, "HEAD") == set()
    (root / "tests/a/test_low.py").write_text("x = 1\n", "utf-8")
    (root / "tests/a/test_high.py").unlink()
    (root / "new file.py").write_text("", "utf-8")
    (root / "a.log").write_text("", "utf-8")
    expected = {"tests/a/test_low.py", "tests/a/test_high.py", "new file.py"}
    assert changed_paths(root, "HEAD") == expected
    git("add", ".")
    git("commit", "-m", "second")
    assert changed_paths(root, "HEAD") == set()
    assert changed_paths(root, "HEAD~1") == expected


def test_the_packages_own_imports_are_known() -> None:
    assert "hetero_gateway.errors" in package_imports()["hetero_gateway.cli"]
