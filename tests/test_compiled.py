"""The compiled scheduler: the same decisions to the bit, and never one of another source."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway import compiled
from scripts.compiling import compile_all
from tests.fakes.processes import Process
from tests.fakes.vllm import fake_instances

PACKAGE = Path(compiled.__file__).parent
PROJECT = PACKAGE.parents[1]
_BUILT = shutil.ignore_patterns("native", "__pycache__")
# Prints whether it is compiled, and what became of every request under every policy.
DECIDE = """\
import hashlib, json, sys
from hetero_gateway import compiled
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
print(json.dumps([compiled.is_taken(), found]))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the package with its scheduler compiled, in a folder to import from."""
    folder = tmp_path_factory.mktemp("compiled")
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=_BUILT)
    compile_all(copy / "native")
    yield folder
    shutil.rmtree(folder)


def decisions(path: Path) -> tuple[bool, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", DECIDE],
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{PROJECT}"},
        cwd=path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    taken, found = json.loads(done.stdout)
    return taken, found


@pytest.mark.system
@pytest.mark.slow
def test_it_decides_as_its_source_does_to_the_bit(package: Path, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=_BUILT)
    (is_compiled, one), (is_plain, other) = decisions(package), decisions(tmp_path)
    assert (is_compiled, is_plain) == (True, False)
    assert len(one) > 20
    assert one == other


@pytest.mark.system
@pytest.mark.slow
async def test_it_serves(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(package))
    async with fake_instances(2) as fakes:
        instances = [{"id": f"i{i}", "base_url": fake.url} for i, fake in enumerate(fakes)]
        config = tmp_path / "gateway.json"
        config.write_text(json.dumps({"instances": instances}))
        gateway = Process("serve", "-c", str(config), "--port", "0")
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


def test_where_nothing_was_compiled_nothing_is_said(tmp_path: Path) -> None:
    assert compiled.take(tmp_path) == ""
