"""What benchmarks share: printing, and the search for free ports."""

import contextlib
import json
import socket
from pathlib import Path

import pytest

from benchmarks import ports
from benchmarks.tables import Column, report, write_between_markers
from hetero_gateway.errors import ConfigError

COLUMNS = (Column("policy", "policy", 8), Column("µs", "us", 7, ".1f"))
MET = {"policy": "a", "us": 1.25, "met": True}
MISSED = {"policy": "b", "us": None, "met": False}


def test_a_missed_goal_is_marked_and_gives_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([MET, MISSED], COLUMNS, as_json=False) == 1
    assert capsys.readouterr().out.splitlines() == [
        "policy       µs",
        "a           1.2",
        "b             -  missed",
        "a goal is missed",
    ]
    assert report([MET], COLUMNS, as_json=False) == 0


def test_json_is_one_document_with_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(iter([MET, MISSED]), COLUMNS, as_json=True, goal_us=3) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["results"] == [MET, MISSED]
    assert document["met"] is False
    assert document["goal_us"] == 3
    assert {"python", "numpy"} <= set(document)


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    begin, end = markers = ("<!-- begin -->", "<!-- end -->")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_between_markers(page, markers, "new")
    assert page.read_text() == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(ConfigError, match="has no lines"):
        write_between_markers(page, markers, "new")


def test_every_port_of_the_row_can_be_bound() -> None:
    first = ports.free_port(in_a_row=8)
    with contextlib.ExitStack() as servers:
        for port in range(first, first + 8):
            servers.enter_context(socket.socket()).bind(("127.0.0.1", port))


def test_a_row_with_a_taken_port_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_FIRST", port)
        monkeypatch.setattr(ports, "_END", port + 2)  # only the row that begins at it can be drawn
        with pytest.raises(RuntimeError, match="no 2 free ports in a row"):
            ports.free_port(in_a_row=2)
