"""The light ones of scripts/client_programs, through a gateway with an emulated instance."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.processes import emulated_cluster

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).resolve().parents[2] / "scripts" / "client_programs"
PROGRAM_NAMES = ["curl.sh", "openai_python.py"]
if shutil.which("hey"):
    PROGRAM_NAMES.append("hey.sh")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    profiles = {"one": "H100-80GB-SXM/Llama-3-8B/tp1"}
    with emulated_cluster(tmp_path_factory.mktemp("clients"), profiles) as (gateway, _):
        yield gateway.url


@pytest.mark.parametrize("name", PROGRAM_NAMES)
def test_a_client_program_does_all_that_it_claims(url: str, name: str) -> None:
    first = [sys.executable] if name.endswith(".py") else []
    command = [*first, str(PROGRAMS / name), url, "llama-3-8b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    version, what = done.stdout.strip().split("|")
    assert version[0].isdigit()
    assert what
