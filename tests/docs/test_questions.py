"""What a user asks first has its answer one click from the documentation's first page."""

import re
from pathlib import Path

import pytest

from tests.docs.test_links import anchors, slug

DOCS = Path(__file__).resolve().parents[2] / "docs"
# A word of each question, and what a reader must find there: a command, a setting, a path.
QUESTIONS = {
    "policy": "policy: finish-time",
    "Kubernetes": "helm install",
    "two gateways": "shared: redis://",
    "upgrade": "hetero-gateway validate",
    "slow": "hetero-gateway why",
    "not do": "| here |",
    "add an instance": "/admin/instances",
    "dies": "hetero-gateway status",
    "keys": "hetero-gateway key new",
    "Grafana": "scrape_configs:",
    "profile": "hetero-gateway profile http",
    "buy": "offers:",
}


def rows() -> dict[str, str]:
    """Of the table of questions: question, and where its answer is."""
    section = (DOCS / "index.md").read_text("utf-8").partition("\n## Questions\n")[2]
    table = section.partition("\n## ")[0]
    return dict(re.findall(r"^\| (.+\?) \| \[.*\]\((.*)\) \|$", table, re.MULTILINE))


def section_of(page: Path, anchor: str) -> str:
    """A heading's text, as far as the next one of its level."""
    level, fenced, kept = 0, False, list[str]()
    for line in page.read_text("utf-8").splitlines():
        fenced ^= line.startswith("```")
        heading = None if fenced else re.match(r"(#+) (.*)", line)
        if heading and level and len(heading[1]) <= level:
            break
        if heading and slug(heading[2]) == anchor:
            level = len(heading[1])
        if level:
            kept.append(line)
    return "\n".join(kept)


def test_there_are_as_many_questions_as_here() -> None:
    assert len(rows()) == len(QUESTIONS)


@pytest.mark.parametrize(("word", "answer"), QUESTIONS.items())
def test_a_question_leads_to_its_answer(word: str, answer: str) -> None:
    (link,) = (link for question, link in rows().items() if word in question)
    file, _, anchor = link.partition("#")
    assert anchor in anchors(DOCS / file)
    assert answer in section_of(DOCS / file, anchor)
