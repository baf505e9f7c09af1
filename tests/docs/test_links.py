"""Every relative link of the README and the documents leads to a file, and to a heading in it."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "docker").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)|\]\(<([^>]+)>\)")


def slug(heading: str) -> str:
    """The anchor that GitHub and mkdocs give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return frozenset(slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_resolves(page):
    path = ROOT / page
    text = CODE.sub("", path.read_text("utf-8"))
    for link in (first or second for first, second in LINK.findall(text)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        assert file.exists(), f"{page}: {link}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.resolve()), f"{page}: {link}"


def test_the_package_and_the_scripts_name_documents_that_exist():
    for folder in ("src", "scripts", "tests", "benchmarks", "configs", "docker"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".gz", ".png", ".pyc", ".csv"} or not file.is_file():
                continue
            text = file.read_text("utf-8", errors="ignore")
            for mention in re.findall(r"(?<![\w/.])docs/[\w./-]+\.md", text):
                assert (ROOT / mention).is_file(), f"{file.relative_to(ROOT)}: {mention}"
