"""Tables of plain text, and the figures in them."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_gateway.lab.load.admin import printable


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns two spaces apart; a column of figures is set to the right."""
    lines = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [all(cell[:1].isdigit() or cell == "-" for cell in c) for c in zip(*rows, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())


def figure(value: float | None, unit: str = "") -> str:
    """A number to read, or - where there is none."""
    if value is None:
        return "-"
    return (f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}") + unit


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
