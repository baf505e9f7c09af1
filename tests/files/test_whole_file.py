"""A file is the old one or the new one, whole, whatever happens while it is written."""

import os
from pathlib import Path

import pytest

from hetero_gateway.files.whole_file import write_whole


def test_the_new_text_replaces_the_old_with_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "start.sh"
    path.write_text("old")
    write_whole(path, "größer", mode=0o755)
    assert path.read_text(encoding="utf-8") == "größer"
    assert path.stat().st_mode & 0o777 == 0o755
    write_whole(path, "again")
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(error):
        write_whole(path, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]
