"""docs/reference has every command, option, path and error code that the code has."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from hetero_gateway.http.failures import Failure
from scripts import reference_pages
from tests.fakes.running import CHAT, chat, rig

ROOT = Path(__file__).resolve().parents[2]
# The gateway's own statuses beside their codes, as arguments of what makes an error.
CODE = re.compile(r'\b([45]\d\d),\s*"([a-z]+_[a-z_]+)"|_unavailable\(\s*"([a-z_]+)"')


def test_the_pages_that_are_made_from_the_code_are_as_the_code_is():
    for path, text in reference_pages.pages().items():
        assert path.read_text("utf-8") == text, f"{path.name} is out of date: run scripts/reference"


async def test_a_running_gateway_exposes_no_metric_that_is_not_in_the_reference():
    """Nor one that the page has with other labels."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", page, re.MULTILINE)
    told = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    async with rig(2) as (running, client, _):
        await client.post(CHAT, json=chat())
        text = await running.metrics()
    families = [
        family
        for family in text_string_to_metric_families(text)
        if family.name.startswith("hetero_gateway_")
    ]
    assert len(families) > 40
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        kind, labels = told[name]
        assert family.type == kind, name
        assert all(set(sample.labels) - {"le"} == labels for sample in family.samples), name


def test_every_argument_of_every_command_says_what_it_is():
    page = reference_pages.commands_page()
    assert not re.findall(r"^\| (`.*`) \|\s*(?:required)?\s*\|$", page, re.MULTILINE)


def test_every_error_code_is_documented():
    page = (ROOT / "docs" / "reference" / "http.md").read_text("utf-8")
    table = page.partition("\n## Errors\n")[2]
    codes = {failure.code for failure in Failure} | {"queue_full", "queue_timeout", "wait_too_long"}
    for folder in ("gateway", "http", "scaleout"):
        for file in (ROOT / "src" / "hetero_gateway" / folder).rglob("*.py"):
            for _, code, other in CODE.findall(file.read_text("utf-8")):
                codes.add(code or other)
    assert len(codes) > 30
    assert not {code for code in codes if f"`{code}`" not in table}


def test_every_header_of_our_own_is_documented():
    page = (ROOT / "docs" / "reference" / "http.md").read_text("utf-8")
    named = set()
    for file in (ROOT / "src" / "hetero_gateway").rglob("*.py"):
        named |= set(re.findall(r'"(x-hetero-gateway-[a-z-]+)"', file.read_text("utf-8")))
    named -= {"x-hetero-gateway-peer"}  # between the gateway's own processes
    assert named
    assert not {name for name in named if f"`{name}`" not in page}
