"""What a release is made of: the package's metadata, its page, and the workflow that publishes."""

import email
import fnmatch
import re
import tomllib
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes import schemas
from tests.fakes.wheels import build

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
URL = "https://host.example/somebody/hetero-gateway"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def metadata_of(folder: Path, url: str | None) -> Message:
    """Of a wheel that is built now."""
    wheel = build(folder, PROJECT_URL=url or "")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        return email.message_from_bytes(archive.read(name))


def page_of(metadata: Message) -> str:
    payload = metadata.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode("utf-8")


def test_the_package_page_has_links_that_lead_somewhere(tmp_path: Path) -> None:
    metadata = metadata_of(tmp_path, URL + "/")
    named = dict(each.split(", ") for each in metadata.get_all("Project-URL", []))
    assert named["Homepage"] == URL
    links = LINK.findall(page_of(metadata))
    ours = [link for link in links if link.startswith(URL)]
    assert ours
    assert all(link.startswith(("http", "#")) for link in links)
    version = metadata["Version"]
    for link in ours:
        path = re.fullmatch(rf"{URL}/(?:raw|blob)/v{version}/([^#]+)(?:#.*)?", link)
        assert path is not None, link
        assert (ROOT / path[1]).exists(), link


def test_without_an_address_no_link_is_made_up(tmp_path: Path) -> None:
    metadata = metadata_of(tmp_path, None)
    assert metadata.get_all("Project-URL") is None
    page = page_of(metadata)
    assert all(link.startswith(("http", "#")) for link in LINK.findall(page))
    assert page.startswith("# hetero-gateway\n")


def test_the_package_says_what_it_is_and_where_it_runs(tmp_path: Path) -> None:
    from trove_classifiers import classifiers

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["authors"]
    assert {"vllm", "load-balancing"} <= set(project["keywords"])
    assert set(project["classifiers"]) <= set(classifiers)
    for minor in (11, 12, 13, 14):
        assert f"Programming Language :: Python :: 3.{minor}" in project["classifiers"]


@pytest.fixture(scope="module")
def workflow() -> Any:
    return yaml.safe_load(WORKFLOW.read_text("utf-8"))


def test_the_workflow_is_one_by_its_schema() -> None:
    code, said = schemas.check("github-workflows", WORKFLOW)
    assert code == 0, said


def test_the_workflow_publishes_wheel_image_and_chart_after_the_checks(workflow: Any) -> None:
    jobs = workflow["jobs"]
    assert {"containers", "wheel", "image", "chart"} <= set(jobs)
    for name in set(jobs) - {"check"}:
        reached, needs = set(), jobs[name]["needs"]
        while needs != "check" and needs not in reached:
            reached.add(needs)
            needs = jobs[needs]["needs"]
        assert needs == "check", name


def test_what_the_workflow_names_is_there(workflow: Any) -> None:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    text = " ".join(str(step.get("run", "")) + str(step.get("with", "")) for step in steps)
    named = set(re.findall(r"\b(?:scripts|docker|requirements|src)/[\w./]*\w", text))
    assert {
        "scripts/test",
        "scripts/containers",
        "docker/Dockerfile",
        "docker/kubernetes/chart",
    } <= named
    assert all((ROOT / path).exists() for path in named), named


def test_the_compiled_wheels_are_of_every_python_that_is_tested(workflow: Any) -> None:
    """They and the one for all machines are published together, and each is seen to be compiled."""
    jobs = workflow["jobs"]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["cibuildwheel"]
    built = [f"{name[2]}.{name[3:5]}" for name in settings["build"].split()]
    assert built == jobs["check"]["strategy"]["matrix"]["python"]
    assert settings["environment"]["HATCH_BUILD_HOOKS_ENABLE"] == "1"
    assert settings["build-frontend"]["args"] == ["--no-isolation"]
    locks = "--require-hashes -r requirements/build.txt -r requirements/compile.txt"
    assert settings["before-build"] == f"pip install {locks}"
    assert "compiled" in settings["test-command"][0]
    (uploaded,) = (s["with"] for s in jobs["compiled"]["steps"] if "upload-artifact" in s["uses"])
    (taken,) = (s["with"] for s in jobs["wheel"]["steps"] if "download" in s.get("uses", ""))
    assert fnmatch.fnmatch(uploaded["name"], taken["pattern"])
    assert taken["path"] == uploaded["path"] == "dist"


def test_nobody_is_given_more_than_a_job_needs(workflow: Any) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job
        assert "secrets." not in yaml.safe_dump(job)
