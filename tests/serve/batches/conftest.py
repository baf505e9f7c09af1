import time

import pytest


@pytest.fixture(autouse=True)
def _windows_are_virtual(anyio_backend: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows end by the time of day, which passes with the virtual clock here."""
    ahead_s = time.time() - time.monotonic()
    monkeypatch.setattr(time, "time", lambda: ahead_s + time.monotonic())
