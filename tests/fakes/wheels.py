"""The package's wheel: built from the source, or from what the image's build may see, installed."""

import os
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement

from tests.fakes.processes import Process

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600.0


class Installed(Process):
    """A command of an environment that the wheel was installed in."""

    def __init__(self, script: Path, *args: str) -> None:
        self.script = script
        super().__init__(*args)

    def command(self, *args: str) -> list[str]:
        return [str(self.script), *args]


def copied_into_the_build() -> set[str]:
    """What docker/Dockerfile takes of the project."""
    structure = DockerfileParser(str(ROOT / "docker" / "Dockerfile")).structure
    return {
        source
        for line in structure
        if line["instruction"] == "COPY" and not line["value"].startswith("--from")
        for source in line["value"].split()[:-1]
    }


def copy_context(folder: Path) -> Path:
    """A folder with nothing else in it."""
    for name in copied_into_the_build():
        source, there = ROOT / name, folder / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.py[co]", "native")
            shutil.copytree(source, there, ignore=ignored)
        else:
            shutil.copy(source, there)
    return folder


def build(folder: Path, source: Path = ROOT, **environment: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=source, env=os.environ | environment, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("hetero_gateway-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """The console script and the packages of a fresh environment, which has what the wheel asks for
    and none of the extras: links to what is installed here, so that no network is needed.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=PATIENCE_S)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (dist_info,) = site.glob("hetero_gateway-*.dist-info")
    requires = metadata.PathDistribution(dist_info).requires or []
    linked = _link_dependencies(site, [text for text in requires if "extra ==" not in text])
    assert not linked & {"hatchling", "matplotlib", "mypy", "numba", "openai", "pytest", "redis"}
    return folder / "bin" / "hetero-gateway", site


def _link_dependencies(site: Path, requirements: list[str]) -> set[str]:
    """Links to all that these need, and to no more; returns their names."""
    wanted = [(text, "") for text in requirements]
    linked: set[str] = set()
    while wanted:
        text, extra = wanted.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        found = metadata.distribution(name)
        more = found.requires or []
        wanted += [(each, part) for each in more for part in (requirement.extras or {""})]
        if name in linked:
            continue
        linked.add(name)
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
    return linked
