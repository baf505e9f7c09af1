"""The package page's text and links, made from README.md when the package is built.

Links of README.md are relative to the source. A package page has no source beside it: with the
environment variable PROJECT_URL (the repository's address, which whoever hosts the project knows)
they become links into it, of this version; without it their text alone is kept, and no picture.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link or a picture to what is neither an address nor a place in the same page.
_RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def page_text(text: str, url: str | None, version: str) -> str:
    """README.md as a package page shows it."""

    def link(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        if url is None:
            return "" if picture else words
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({url}/{kind}/v{version}/{path})"

    return _RELATIVE.sub(link, text)


class CustomMetadataHook(MetadataHookInterface):
    """Named in pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in ``readme`` and ``urls``, which pyproject.toml calls dynamic."""
        url = os.environ.get("PROJECT_URL", "").rstrip("/") or None
        text = Path(self.root, "README.md").read_text("utf-8")
        text = page_text(text, url, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if url is not None:
            metadata["urls"] = {
                "Homepage": url,
                "Documentation": f"{url}/blob/v{metadata['version']}/docs/index.md",
                "Changelog": f"{url}/blob/v{metadata['version']}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
