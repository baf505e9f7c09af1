"""README's first lines of Python work in front of the demo."""

import re
from pathlib import Path

from hetero_gateway.cli.demo import MODEL

ROOT = Path(__file__).parents[2]


def test_the_snippet_asks_for_the_model_that_the_demo_serves():
    asked = re.findall(r'model="([^"]+)"', (ROOT / "README.md").read_text("utf-8"))
    assert asked == [MODEL]
