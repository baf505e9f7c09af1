"""Which test files can be touched by what differs from a commit: ``scripts/test --changed``.

    python scripts/changed_tests.py [REVISION]

Prints a path for each line, or ``tests`` for all of them; the default is HEAD. Files that git does
not know, and does not ignore, count as changed.

A test file is touched when it, or something that it reaches, has changed. It reaches what it
imports, and what that imports; the conftest.py of its folders; a module whose name it has in a
string (``monkeypatch.setattr("hetero_gateway.…")``); a command that it has as an argument
(``"serve"``); and a file or a folder of the repository that it names. What lies beside modules and
is none, as data, belongs to all of its folder.

What only runs, as an installed program or a wheel, is not seen: ``scripts/test`` runs everything,
and so does continuous integration.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, SOURCE = "hetero_gateway", "src"
READ = ("tests", "benchmarks", "scripts")
CLI, PROCESSES = f"{PACKAGE}.cli.", f"{PACKAGE}.load.children"
# What all tests stand on.
EVERYTHING = {"pyproject.toml", "tests/conftest.py", "tests/budgets.toml", "scripts/test"}


def changed_paths(root: Path, revision: str) -> set[str]:
    """What differs from a commit, and what git does not know, from the root on."""
    asked = (
        ("diff", "--name-only", "--no-renames", "-z", revision),
        ("ls-files", "--others", "--exclude-standard", "-z"),
    )
    found: set[str] = set()
    for words in asked:
        printed = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        )
        found |= {path for path in printed.stdout.split("\0") if path}
    return found


class Reach:
    """What each Python file of the repository reaches: modules, and names of files and folders."""

    def __init__(self, root: Path, package_imports: Mapping[str, set[str]]) -> None:
        self._package = package_imports
        self._tests = {
            module_of(path.relative_to(root)): path.relative_to(root)
            for folder in READ
            for path in (root / folder).rglob("*.py")
        }
        self._known = {*self._package, *self._tests}
        self._edges: dict[str, set[str]] = {m: {*found} for m, found in package_imports.items()}
        self._names: dict[str, set[str]] = {}
        arguments: dict[str, set[str]] = {}
        for module, path in self._tests.items():
            imported, strings, arguments[module] = parts_of((root / path).read_text("utf-8"))
            named = {known for name in imported | strings for known in self._modules_named(name)}
            self._edges[module] = named | self._conftests(path)
            self._names[module] = {part for text in strings for part in text.split("/")}
        # What starts the demo's and the benchmarks' processes is of the package.
        for module in (PROCESSES, *package_imports):
            if module == PROCESSES or PROCESSES in package_imports[module]:
                path = root / SOURCE / f"{module.replace('.', '/')}.py"
                if path.exists():
                    *_, arguments[module] = parts_of(path.read_text("utf-8"))
                    self._edges[module].add(f"{PACKAGE}.cli")
        commands = {name.rpartition(".")[2]: name for name in self._package if CLI in name}
        running = {m for m in arguments if f"{PACKAGE}.cli" in self._closed(m)}
        for module in running:
            self._edges[module] |= {commands[w] for w in arguments[module] if w in commands}

    def _modules_named(self, name: str) -> Iterator[str]:
        """The longest beginning of a dotted name that is a module; what runs as ``-m NAME``."""
        if f"{name}.__main__" in self._known:
            yield f"{name}.__main__"
        while name and name not in self._known:
            name = name.rpartition(".")[0]
        if name:
            yield name

    def _conftests(self, path: Path) -> set[str]:
        return {module_of(folder / "conftest.py") for folder in path.parents} & {*self._tests}

    def _closed(self, start: str) -> set[str]:
        seen, ahead = {start}, [start]
        while ahead:
            new = self._edges.get(ahead.pop(), set()) - seen
            seen |= new
            ahead.extend(new)
        return seen

    def tests_of(self, changed: Iterable[str]) -> list[str]:
        """The test files that reach one of these paths."""
        modules: set[str] = set()
        wanted: list[set[str]] = []
        for text in changed:
            path = PurePosixPath(text)
            modules |= self._modules_of(path)
            wanted.append({path.name})
            if len(path.parts) > 1:
                # "src" alone may be an attribute of a page's.
                wanted.append({SOURCE, PACKAGE} if path.parts[0] == SOURCE else {path.parts[0]})
        found = []
        for module, path in self._tests.items():
            if path.parts[0] == "tests" and path.name.startswith("test_"):
                reached = self._closed(module)
                # What helpers name is theirs: they are reached by many who do not use it.
                names = self._names[module]
                if reached & modules or any(each <= names for each in wanted):
                    found.append(path.as_posix())
        return sorted(found)

    def _modules_of(self, path: PurePosixPath) -> set[str]:
        """The module of a file; of what is no module, all that stand beside it, or above."""
        if path.parts[0] not in (SOURCE, *READ):
            return set()
        module = module_of(path.relative_to(SOURCE) if path.parts[0] == SOURCE else path)
        if path.suffix == ".py":
            # Who imports a module has run the __init__ of its packages before.
            if path.name == "__init__.py":
                return {module} | {m for m in self._known if m.startswith(f"{module}.")}
            return {module}
        while module := module.rpartition(".")[0]:
            if beside := {m for m in self._known if module in (m, m.rpartition(".")[0])}:
                return beside
        return set()


def module_of(path: Path | PurePosixPath) -> str:
    """A file's dotted name."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parts_of(text: str) -> tuple[set[str], set[str], set[str]]:
    """(names that a file imports, strings in it but for docstrings, commands among arguments)"""
    imported: set[str] = set()
    strings: set[str] = set()
    arguments: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value) < 200:
                strings |= {*node.value.split()}
        elif isinstance(node, ast.Call | ast.List | ast.Tuple):
            values = node.args if isinstance(node, ast.Call) else node.elts
            arguments |= {v.value for v in values if _is_word(v)}
    return imported, strings, arguments


def _is_word(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def package_imports() -> dict[str, set[str]]:
    """What each module of the package imports of it, for its types alone as well."""
    graph = grimp.build_graph(PACKAGE)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def select(root: Path, changed: set[str], imports: Mapping[str, set[str]]) -> list[str]:
    """The test files to run for what has changed; ``tests`` is all of them."""
    if changed & EVERYTHING:
        return ["tests"]
    return Reach(root, imports).tests_of(changed) if changed else []


def main() -> None:
    changed = changed_paths(ROOT, *(sys.argv[1:] or ["HEAD"]))
    print(*select(ROOT, changed, package_imports()), sep="\n")


if __name__ == "__main__":
    main()
