"""A hook of mkdocs: links from a page to a file outside of docs/.

On GitHub they lead there. On the site there is no such page: they lead to ``repo_url`` where one is
set, and are plain text with the file's path where none is.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page's text, with its links out of docs/ replaced."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        if config.repo_url:
            return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/main/{target})"
        return link[1] if target in link[1] else f"{link[1]} (`{target}`)"

    return _LINK.sub(replaced, markdown)
