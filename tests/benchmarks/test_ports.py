"""The search for free ports."""

from __future__ import annotations

import contextlib
import socket

import pytest

from benchmarks import ports


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
