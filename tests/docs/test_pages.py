"""The pages as a whole: what they quote is there, and the site is built without a warning."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from hetero_gateway.files.gateway_config import GatewayConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = "server|scheduler|timeouts|retry|pool|health|picker|clients"


def inner_model(annotation: Any) -> type[BaseModel] | None:
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def known(name: str) -> bool:
    """Whether ``server.host`` and the like is a key of the configuration."""
    model: type[BaseModel] | None = GatewayConfig
    for part in name.split("."):
        if model is None or part not in model.model_fields:
            return False
        model = inner_model(model.model_fields[part].annotation)
    return True


def test_every_setting_that_a_page_names_exists():
    assert known("health.ejection.base_s")
    assert not known("health.base_s")
    unknown = {
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(rf"`((?:{SECTIONS})\.[a-z_.]*[a-z_])`", page.read_text("utf-8"))
        if not known(name) and not name.endswith(".py")
    }
    assert not unknown


def configurations() -> list[tuple[str, dict[str, Any]]]:
    """(page, content) of a gateway's file as README and guide show it; not of the chart."""
    found = []
    for page in [PAGES[0], *(p for p in PAGES if p.parent.name == "guide")]:
        blocks = re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        for block in blocks if page.stem != "kubernetes" else ():
            content = yaml.safe_load(block)
            if isinstance(content, dict) and set(content) <= set(GatewayConfig.model_fields):
                found.append((page.stem, content))
    return found


def test_the_configurations_that_the_guide_shows_are_valid() -> None:
    shown = configurations()
    assert len(shown) >= 20
    assert {"migrate", "operate", "clients", "batches", "models", "gateways"} <= dict(shown).keys()
    for page, content in shown:
        try:
            GatewayConfig.model_validate(content)
        except ValueError as error:
            pytest.fail(f"{page}: {content}: {error}")


def test_every_page_is_in_the_navigation():
    # mkdocs' own tags (a slugifier) are none of this test's business.
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text("utf-8"))
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"])))
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    assert listed == there


def test_no_page_has_a_heading_twice():
    """Anchors of a second one are spelled in one way on GitHub and in another on the site."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert len(headings) == len(set(headings)), page.name


@pytest.mark.system
@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "guide" / "start" / "index.html").is_file()
