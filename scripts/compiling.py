"""Compiles the scheduler, into ``hetero_gateway/native`` or the folder that is named.

With the environment variable MYPYC_OPT_LEVEL the C compiler does less than it can (3): at 0, which
tests take, it all needs a quarter of the time, and the results are the same.
"""

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
    f"hetero_gateway.{name}"
    for name in """
        core.costs.cost_model core.costs.profile core.histogram core.request
        core.instances.concurrency core.instances.dispatch core.instances.outcomes
        core.instances.pairs core.instances.prefix_hits core.instances.sightings
        core.instances.speed core.instances.state core.instances.table core.lengths.predictors
        core.policies.affinity core.policies.at_once core.policies.base core.policies.counting
        core.policies.estimates core.policies.finish_time core.policies.legs core.policies.member
        core.policies.rotation core.policies.slo core.policies.workload
        core.prefixes.caches core.prefixes.key_tables core.prefixes.trust
        core.scheduling.decider core.scheduling.decision_log core.scheduling.legs
        core.scheduling.members
        core.scheduling.pool core.scheduling.probes
        core.scheduling.queue core.scheduling.restraints core.scheduling.scheduler
        core.scheduling.shedding
        gateway.dataplane.dispatcher gateway.dataplane.intake gateway.dataplane.placement
        gateway.dataplane.records gateway.records.history gateway.records.series
        gateway.dataplane.relay gateway.dataplane.continuing gateway.dataplane.handover
        http.upstream http.response
    """.split()
]
SETUP = """\
import os, sys
from mypyc.build import mypycify
from setuptools import setup
# Of other packages nothing is known, as where a wheel is built: what is compiled is the same.
known = ["--follow-imports=silent", "--ignore-missing-imports", "--no-site-packages"]
options = [*known, "--strict", "--no-warn-return-any", *sys.argv.pop().split()]
level = os.environ.get("MYPYC_OPT_LEVEL", "3")
setup(name="native", packages=[], ext_modules=mypycify(options, opt_level=level))
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
    folder = Path(sys.argv[1]) if sys.argv[1:] else compiled.FOLDER
    table = folder / compiled.TABLE
    if (
        table.exists()
        and json.loads(table.read_text("utf-8"))["modules"] == MODULES
        and not compiled.take(folder)
    ):
        print("the scheduler is compiled already", file=sys.stderr)
        return
    compile_all(folder)
    print(f"compiled into {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
