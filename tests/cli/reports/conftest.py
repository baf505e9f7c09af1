"""What the tests of pages share."""

import pytest

from tests.fakes.pages import LIBRARY


@pytest.fixture
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five megabytes of plotly.js would make every failure's message unreadable."""
    import plotly.offline

    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: LIBRARY)
