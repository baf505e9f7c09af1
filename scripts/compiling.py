"""Compiles the modules of the scheduler into ``hetero_gateway/native``; see ``scripts/compile``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hetero_gateway import compiled

# What each request runs through. What numpy or an enumeration with a constructor of its own needs
# stays as it is.
MODULES = [
    f"hetero_gateway.core.{name}"
    for name in (
        "costs.cost_model",
        *(
            f"instances.{name}"
            for name in (
                *("concurrency", "dispatch", "prefix_hits", "sightings", "speed", "state", "table"),
            )
        ),
        *(
            f"policies.{name}"
            for name in (
                *("affinity", "base", "counting", "estimates", "finish_time", "member"),
                *("rotation", "slo", "workload"),
            )
        ),
        "prefixes.caches",
        *(
            f"scheduling.{name}"
            for name in (
                *("decider", "decision", "decision_log", "members", "pool", "probes", "queue"),
                *("restraints", "scheduler", "shedding"),
            )
        ),
    )
]
SETUP = """\
import sys
from mypyc.build import mypycify
from setuptools import setup
options = ["--follow-imports=silent", "--ignore-missing-imports", "--strict"]
setup(name="native", packages=[], ext_modules=mypycify([*options, *sys.argv.pop().split()]))
"""


def compile_all(folder: Path) -> None:
    """Into this folder, which is made anew. SystemExit: it cannot be compiled."""
    source = Path(compiled.__file__).parent
    with tempfile.TemporaryDirectory() as build:
        shutil.copytree(source, Path(build, source.name), ignore=shutil.ignore_patterns("native"))
        Path(build, "setup.py").write_text(SETUP)
        files = [name.replace(".", "/") + ".py" for name in MODULES]
        words = ("setup.py", "--quiet", "build_ext", "--build-lib", "out", " ".join(files))
        made = subprocess.run(
            [sys.executable, *words], cwd=build, capture_output=True, text=True, check=False
        )
        if made.returncode:
            print(made.stdout + made.stderr, file=sys.stderr)
            raise SystemExit("scripts/compile: it cannot be compiled; see above")
        (shared,) = Path(build, "out").glob("*__mypyc.*")
        name, _, rest = shared.name.partition(".")
        table = {
            "modules": MODULES,
            "shared": name,
            "suffix": f".{rest}",
            "digest": compiled.digest(MODULES),
        }
        Path(build, "out", compiled.TABLE).write_text(json.dumps(table, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(build, "out"), folder)


def main() -> None:
    if "--remove" in sys.argv[1:]:
        shutil.rmtree(compiled.FOLDER, ignore_errors=True)
        return
    if (compiled.FOLDER / compiled.TABLE).exists() and not compiled.take():
        print("the scheduler is compiled already", file=sys.stderr)
        return
    compile_all(compiled.FOLDER)
    print(f"compiled into {compiled.FOLDER}", file=sys.stderr)


if __name__ == "__main__":
    main()
