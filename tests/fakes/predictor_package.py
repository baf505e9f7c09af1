"""The predictor package of docs/design/predictors.md, built and installed as a user would do it."""

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "design" / "predictors.md"

# Bad ones, beside the one that the document shows. The exception quotes the prompt.
BROKEN = """

class Raising(WordPredictor):
    def predict(self, features):
        raise ValueError("cannot read " + features.prompt_text())


class NotEvenMade:
    def __init__(self, options):
        raise RuntimeError("no weights")


def make_nothing(options):
    return None
"""
BROKEN_ENTRIES = """
raising = "word_predictor:Raising"
not-made = "word_predictor:NotEvenMade"
nothing = "word_predictor:make_nothing"
missing = "word_predictor:Missing"
"""


def install_predictors(folder: Path) -> Path:
    """Write the package under ``folder``, build it, and return where it is installed."""
    text = DOCUMENT.read_text(encoding="utf-8")
    module = _block(text, "python", "class WordPredictor")
    project = _block(text, "toml", "entry-points")
    source, target = folder / "source", folder / "installed"
    source.mkdir()
    (source / "word_predictor.py").write_text(module + BROKEN, encoding="utf-8")
    entries = re.sub(r"(?m)^(words = .*)$", r"\1" + BROKEN_ENTRIES, project)
    (source / "pyproject.toml").write_text(entries, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=120)
    return target


def _block(text: str, language: str, holds: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    (found,) = (block for block in blocks if holds in block)
    return str(found)
