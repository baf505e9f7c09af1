"""What is made when the package is built: its page, and the compiled scheduler if that is wanted.

The page's text and links are README.md's, whose links are relative to the source. A package page
has no source beside it: with the environment variable PROJECT_URL (the repository's address, which
whoever hosts the project knows) they become links into it, of this version; without it their text
alone is kept, and no picture.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
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


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """A wheel with the compiled scheduler; pyproject.toml says when."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it, and have the wheel say for whom it is."""
        self._made = tempfile.TemporaryDirectory()
        folder = os.path.join(self._made.name, "native")
        root = Path(self.root)
        path = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, str(root / "scripts" / "compiling.py"), folder],
            env=os.environ | {"PYTHONPATH": path},
            check=True,
        )
        build_data |= {"pure_python": False, "infer_tag": True}
        build_data["force_include"][folder] = "hetero_gateway/native"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """What was compiled is in the wheel."""
        self._made.cleanup()
