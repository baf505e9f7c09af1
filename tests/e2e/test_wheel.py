"""The wheel alone, in an empty folder: its commands work without the source tree."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from hetero_gateway import __version__
from tests.fakes.wheels import PATIENCE_S, Installed, build, install
from tests.lab.profiler.builders import measured

pytestmark = pytest.mark.system

Run = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console script of a fresh environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("wheel")
    return install(build(folder), folder / "venv")[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, where the commands run; nothing leads from there to the source."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return empty


@pytest.fixture
def run(installed: Path, folder: Path) -> Run:
    def run(*words: str, code: int = 0) -> str:
        """What it printed; what it said on standard error where it is to fail."""
        done = subprocess.run(
            [str(installed), *words], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr if code else done.stdout

    return run


@pytest.fixture
def start(installed: Path, folder: Path) -> Iterator[Callable[..., str]]:
    """Starts a command that serves; its URL."""

    processes: list[Installed] = []

    def start(*words: str) -> str:
        processes.append(Installed(installed, *words))
        return processes[-1].wait_ready()

    yield start
    codes = [process.stop() for process in reversed(processes)]
    assert set(codes) <= {0, -15}


def test_the_walk_from_init_to_a_page_of_measured_load(
    run: Run, start: Callable[..., str], folder: Path
) -> None:
    said = f"hetero-gateway {__version__} (scheduler: interpreted)"
    assert run("--version").strip() == said
    profiles = [f"V100-32GB-NVLink2/Llama-3-8B/tp{n}" for n in (4, 1)]
    urls = [
        start("emulate", "--profile", name, "--port", "0", "--time-scale", "20")
        for name in profiles
    ]
    run("init", "--probe", *urls)
    assert "2 instances" in run("validate", "-c", "gateway.yaml")
    gateway = start("serve", "-c", "gateway.yaml", "--port", "0")
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    answer = httpx.post(f"{gateway}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    page = httpx.get(f"{gateway}/dashboard", timeout=PATIENCE_S)
    linked = re.findall(r'(?:src|href)="(?!data:|#|http)([^"]+)"', page.text)
    assert len(linked) >= 2
    for path in linked:
        part = httpx.get(httpx.URL(f"{gateway}/dashboard").join(path), timeout=PATIENCE_S)
        assert part.status_code == 200, path
    assert "hetero_gateway_instance_up" in httpx.get(f"{gateway}/metrics").text
    assert "2 of 2 instances" in run("status", gateway)
    assert "would get it" in run("explain", gateway, "--prompt-tokens", "80", "--max-tokens", "20")
    load = ("--limit", "20", "--rate", "inf", "--report", "bench.html", "--json")
    assert json.loads(run("bench", gateway, *load))["errors"] == 0
    assert "plotly" in (folder / "bench.html").read_text("utf-8")


def test_what_simulates_plans_and_fits_needs_no_file_of_the_source(run: Run, folder: Path) -> None:
    from hetero_gateway.lab.profiler.samples import write_csv

    tp1 = "V100-32GB-NVLink2/Llama-3-8B/tp1"
    (folder / "cluster.yaml").write_text(f"instances: [{{profile: {tp1}, count: 2}}]\n")
    short = ("--policy", "finish-time", "--rate", "4", "--seeds", "1", "--count", "50")
    run("simulate", "-c", "cluster.yaml", *short, "--report", "simulated.html")
    (folder / "machines.yaml").write_text(
        "model: Llama-3-8B\nmax_model_len: 4096\n"
        "machines: [{id: box, accelerator: V100-32GB-NVLink2, count: 1}]\n"
    )
    run("plan", "-c", "machines.yaml", "-o", "deployment", "--report", "plan.html")
    run("validate", "-c", "deployment/gateway.yaml")
    assert (folder / "deployment/monitoring/prometheus/alerts.yml").exists()
    write_csv(folder / "samples.csv", measured())
    fitted = ("--gpu", "A100", "--model", "m", "--kv-capacity-tokens", "10000")
    pages = ("-o", "fitted.yaml", "--report", "fitted.html")
    run("profile", "--from", "samples.csv", *fitted, *pages)
    for name in ("simulated", "plan", "fitted"):
        assert "plotly" in (folder / f"{name}.html").read_text("utf-8")
    plot = ("--plot", "fitted.svg", "-o", "other.yaml")
    assert "pip install" in run("profile", "--from", "samples.csv", *fitted, *plot, code=2)
    (folder / "trace.csv").write_text(
        "input_tokens,output_tokens\n" + "".join(f"{i},{i // 2}\n" for i in range(10, 400))
    )
    run("predictor", "fit", "--requests", "trace.csv", "-o", "lengths.json")
    assert run("key", "new", "somebody").startswith("hg-")
