"""What is installed: pinned, with hashes, everywhere the same; and the list of it."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("build", "compile", "dev", "run", "uv")
# Only where the platform, or the Python, is another than those that are tested.
_ELSEWHERE = {"async-timeout", "colorama", "httpx2-jsfetch"}


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """(version, hashes) by package."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text("utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        version = re.match(r"[A-Za-z0-9._-]+(?:\[[a-z,-]+\])?==([^ ;]+)", line)
        assert version, line
        found[name_of(line)] = version[1], re.findall(r"--hash=sha256:([0-9a-f]{64})", line)
    return found


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return {name_of(line): line.split("==")[1] for line in lines if "==" in line}


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_hashes_and_the_version_that_is_tested(name: str) -> None:
    pins = pinned()
    for package, (version, hashes) in locked(name).items():
        assert hashes, package
        if package not in _ELSEWHERE:
            assert pins[package] == version, f"{package}: run scripts/lock"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_address_to_download_from(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text("utf-8")
    assert "://" not in text
    assert "index-url" not in text


def test_the_locks_have_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wanted = {name_of(each) for each in project["project"]["dependencies"]}
    extras = project["project"]["optional-dependencies"]
    wanted |= {name_of(each) for extra in ("picker", "dns", "otel") for each in extras[extra]}
    assert wanted <= locked("run").keys(), "run scripts/lock"
    wanted |= {name_of(each) for extra in ("dev", "tokenizers") for each in extras[extra]}
    assert wanted <= locked("dev").keys(), "run scripts/lock"
    assert {name_of(each) for each in project["build-system"]["requires"]} <= locked("build").keys()
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    assert {name_of(each) for each in hook["dependencies"]} <= locked("compile").keys()


def test_what_is_installed_here_is_what_is_locked() -> None:
    for package, (version, _) in locked("run").items():
        if package in _ELSEWHERE:
            continue
        assert metadata.version(package) == version, package


def test_the_image_and_the_installation_check_hashes() -> None:
    assert "--require-hashes" in (ROOT / "scripts" / "install").read_text("utf-8")
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    for line in dockerfile.splitlines():
        for command in re.findall(r"pip[^&]*? install [^&]*", line):
            assert "--require-hashes" in command or "--no-deps dist/" in command, command


@pytest.mark.system
def test_the_bill_of_materials_lists_every_package_with_its_hashes(tmp_path: Path) -> None:
    script = (ROOT / "scripts" / "sbom").read_text("utf-8").replace("\\\n", " ")
    call = re.search(r"exec \.venv/bin/cyclonedx-py (.*) -o", script)
    assert call
    path = tmp_path / "sbom.json"
    command = [str(Path(sys.executable).with_name("cyclonedx-py")), *call[1].split()]
    subprocess.run([*command, "-o", str(path)], cwd=ROOT, check=True, capture_output=True)
    document = json.loads(path.read_text("utf-8"))
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "hetero-gateway"
    listed = {each["name"]: each for each in document["components"]}
    assert {name_of(name) for name in listed} == locked("run").keys()
    for name, component in listed.items():
        version, hashes = locked("run")[name_of(name)]
        assert component["version"] == version
        (source,) = component["externalReferences"]
        assert {each["content"] for each in source["hashes"]} == set(hashes)
