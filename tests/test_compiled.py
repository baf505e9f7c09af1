"""The compiled scheduler: the same decisions to the bit, and never one of another source."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway import __version__, cli, compiled
from scripts.compiling import MODULES
from tests.fakes.vllm import fake_instances
from tests.fakes.wheels import ROOT, Installed, build, copy_context, install

PACKAGE = Path(compiled.__file__).parent
# The tests of the rooms that something is compiled of, and those of a request's way.
ROOMS = {"/".join(["tests", *name.split(".")[1:3]]) for name in MODULES}
PATHS = {room for room in ROOMS if (ROOT / room).is_dir()}
PATHS |= {"tests/gateway/admission", "tests/gateway/dataplane", "tests/e2e/test_accounting.py"}
PATHS |= {"tests/http"}  # a room of one floor
PATHS |= {"tests/scaleout/workers"}  # whose messages hold values of what is compiled
# They ask much of what is not compiled: fits, the index of prefixes, sockets, sessions, fields.
BESIDE = """
    core/costs/test_fitting core/instances/test_calibration core/prefixes/test_index
    gateway/admission/test_limits gateway/dataplane/test_engine_fields
    gateway/dataplane/test_lies gateway/dataplane/test_predictor gateway/dataplane/test_realtime
    gateway/dataplane/test_realtime_limits gateway/dataplane/test_tracing http/test_connections
    http/test_descriptors http/test_downstream http/test_protocol
""".split()
# Prints whether it is compiled, and what became of every request under every policy.
DECIDE = """\
import hashlib, json, sys
from hetero_gateway import compiled
if sys.argv[1] == "compiled":
    assert not compiled.take(), compiled.take()
from hetero_gateway.core.policies import POLICY_NAMES
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.sim.cluster import Records, simulate
from tests.sim.builders import FAST, SLOW, instances, make_scheduler, random_workload
found = {}
for policy in POLICY_NAMES:
    for profiled in (True, False):
        there = instances(*[FAST, SLOW, SLOW] * 4, profiled=profiled)
        load = random_workload(400, 8.0)
        records = simulate(
            there, load, make_scheduler(policy), BucketMeanPredictor(90.0), compiled=False
        )
        data = b"".join(getattr(records, name).tobytes() for name in Records.__slots__)
        found[f"{policy} {profiled}"] = hashlib.sha256(data).hexdigest()
print(json.dumps([compiled.form(), found]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The command and the packages of an environment with a compiled wheel.

    It is made as the image's is, of what its build may see.
    """
    folder = tmp_path_factory.mktemp("compiled")
    context = copy_context(folder / "context")
    # Without what Python's own build is compiled with, it takes two fifths of the time.
    options = {"HATCH_BUILD_HOOKS_ENABLE": "1", "MYPYC_OPT_LEVEL": "0", "CFLAGS": "-O0"}
    wheel = build(folder / "dist", context, **options)
    yield install(wheel, folder / "environment")
    shutil.rmtree(folder)


def decisions(form: str, packages: Path) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", DECIDE, form],
        env={**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    is_form, found = json.loads(done.stdout)
    assert is_form == form
    return found


def said_of_version(*command: str | Path) -> tuple[str, str]:
    """What ``--version`` calls the scheduler, and what it says beside."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    found = re.fullmatch(rf"hetero-gateway {__version__} \(scheduler: (\w+)\)\n", done.stdout)
    assert found, done.stdout
    return found[1], done.stderr


@pytest.mark.system
@pytest.mark.slow
def test_it_decides_as_its_source_does_to_the_bit(installed: tuple[Path, Path]) -> None:
    one, other = decisions("compiled", installed[1]), decisions("interpreted", PACKAGE.parent)
    assert len(one) > 20
    assert one == other


@pytest.mark.system
@pytest.mark.slow
def test_the_tests_pass_on_it(installed: tuple[Path, Path]) -> None:
    words = ("-q", "-p", "tests.fakes.natively", "-m", "not system and not slow", *sorted(PATHS))
    words += tuple(f"--ignore=tests/{name}.py" for name in BESIDE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env={**os.environ, "PYTHONPATH": f"{installed[1]}{os.pathsep}{ROOT}"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
    left_out = re.search(r"(\d+) xfailed", done.stdout)
    budgets = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text("utf-8"))
    assert int(left_out[1] if left_out else 0) == budgets["compiled"]["interpreted_tests"]


@pytest.mark.system
@pytest.mark.slow
async def test_it_serves_where_there_is_no_compiler(
    installed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = installed[0]
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert said_of_version(script) == ("compiled", "")
    async with fake_instances(2) as fakes:
        instances = [{"id": f"i{i}", "base_url": fake.url} for i, fake in enumerate(fakes)]
        config = tmp_path / "gateway.json"
        config.write_text(json.dumps({"instances": instances}))
        gateway = Installed(script, "serve", "-c", str(config), "--port", "0")
        try:
            url = gateway.wait_ready()
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                version: dict[str, Any] = (await client.get("/version")).json()
                assert version["scheduler"] == "compiled"
                async with asyncio.timeout(60):
                    while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
                for stream in (False, True):
                    answer = await client.post(
                        "/v1/chat/completions", json=body | {"stream": stream}
                    )
                    assert answer.status_code == 200
                assert (await client.get("/metrics")).status_code == 200
        finally:
            assert gateway.stop() == 0
    assert not [line for line in gateway.lines if "compiled" in line or "Traceback" in line]


# What is refused


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"suffix": ".cpython-39-x86_64-linux-gnu.so"}, "is of another Python"),
        ({"digest": "0" * 32}, "is of another source"),
        ({"modules": ["hetero_gateway.core.gone"]}, "cannot be used"),
        ({"modules": None}, "cannot be used"),
        ({}, "cannot be used"),  # its binary is no binary
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    modules = ["hetero_gateway.core.types"]
    table = {
        "modules": modules,
        "shared": "no_such__mypyc",
        "suffix": EXTENSION_SUFFIXES[0],
        "digest": compiled.digest(modules),
    }
    (tmp_path / compiled.TABLE).write_text(json.dumps(table | changes))
    (tmp_path / f"no_such__mypyc{EXTENSION_SUFFIXES[0]}").write_bytes(b"no binary")
    finders = list(sys.meta_path)
    why_not = compiled.take(tmp_path)
    assert says in why_not
    assert why_not.endswith("scripts/compile makes it anew")
    assert "\n" not in why_not
    assert sys.meta_path == finders


@pytest.mark.parametrize(("command", "takes"), [("serve", 1), ("plan", 1), ("simulate", 0)])
def test_what_decides_or_plans_takes_it(
    command: str, takes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(compiled, "take", lambda: taken.append(command))
    monkeypatch.setattr(sys, "argv", ["hetero-gateway", command, "--help"])
    with pytest.raises(SystemExit):
        cli._run(None)
    assert len(taken) == takes


def test_where_nothing_was_compiled_nothing_is_said(tmp_path: Path) -> None:
    assert compiled.take(tmp_path) == ""


def test_what_is_refused_is_said_with_the_version_and_the_source_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("native"))
    (tmp_path / PACKAGE.name / "native").mkdir()
    (tmp_path / PACKAGE.name / "native" / compiled.TABLE).write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    form, said = said_of_version(sys.executable, "-m", "hetero_gateway")
    assert form == "interpreted"
    assert said.startswith("hetero-gateway: the compiled scheduler cannot be used (")
    assert said.count("\n") == 1
