"""Pages of ``--report``, parsed."""

import json
from html.parser import HTMLParser
from typing import Any

EVIL = "</script><img src=x onerror=alert(1)>{{plotly}}&\u2028"
# The plots' own library is looked at for what could end the element, not for its text.
LIBRARY = "/* plotly */"


class Page(HTMLParser):
    """The elements and the text of a page; fails on tags that do not match."""

    VOID = frozenset({"meta", "img", "br", "link", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.visible: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            key = self.elements[-1][1].get("id") or self.open[-1]
            self.text[key] = self.text.get(key, "") + data
        else:
            self.visible.append(data)

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def json(self, name: str) -> Any:
        """What stands in the page for programs: ``figures`` or ``document``."""
        return json.loads(self.text[name])
