"""A command's result and its output: lines and tables, a page, or JSON."""

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from hetero_gateway.cli.reports import page
from hetero_gateway.lab.load.admin import printable


@dataclass(frozen=True, slots=True)
class CommandReport:
    """A command's result.

    Args:
        document: what ``--json`` prints.
        text: prints it for people.
        html: the page of ``--report``; None: there is nothing to show.
    """

    document: Any
    text: Callable[[], None]
    html: Callable[[], str] | None

    def tell(self, args: argparse.Namespace) -> None:
        """Output as ``--json`` and ``--report`` ask. Raises ConfigError: the page cannot be
        written."""
        if args.json:
            print(json.dumps(page.without_nan(self.document), default=str))
        else:
            self.text()
        if args.report is not None and self.html is not None:
            page.write(args.report, self.html())
            print(f"wrote {args.report}", file=sys.stderr)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One figure of a comparison.

    ``rank``: on a narrow terminal, columns with the highest rank are dropped first; None: only
    in pages.
    """

    name: str
    text: Callable[[T], str]
    rank: int | None


def console(pipe_width: int, given: Console | None = None) -> Console:
    """Standard output, or the given stream; a pipe has no width of its own."""
    made = given or Console(highlight=False, markup=False)
    if not made.is_terminal:
        made.width = pipe_width
    return made


def grid(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    no_wrap: bool = False,
    fold: Collection[int] = (),
    **options: Any,
) -> Table:
    """A table for a terminal.

    Args:
        left: left-aligned text columns; ``fold``: those that may be broken anywhere.
        no_wrap: the other columns are not broken.
    """
    table = Table(title_justify="left", **options)
    for i, name in enumerate(head):
        table.add_column(
            name,
            justify="left" if i in left else "right",
            no_wrap=no_wrap and i not in fold,
            overflow="fold" if i in fold else "ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    return table


def fitted(
    columns: Sequence[Column[T]], make: Callable[[Sequence[Column[T]]], Table], on: Console
) -> tuple[Table, bool]:
    """The table with as many columns as fit, and whether some were left out."""
    shown = list(columns)
    while len(shown) > 1 and width(make(shown), on) > on.width:
        shown.remove(max(shown, key=lambda column: column.rank or 0))
    return make(shown), len(shown) < len(columns)


def width(table: Table, on: Console) -> int:
    # Measured with room to spare: a table claims to fit whatever width it is offered.
    return Measurement.get(on, on.options.update(width=10_000), table).maximum


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Plain text: columns two spaces apart; a column of figures is right-aligned."""
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
    """A number to read, or - if there is none."""
    if value is None:
        return "-"
    return (f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}") + unit


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def shared_in_words(sharing: dict[str, Any]) -> str:
    """How a gateway stands with the others, from ``sharing`` of ``/admin/instances``."""
    others = sharing["other_replicas"]
    if sharing["mode"] == "shared":
        return f"shares load with {others} other gateway{'' if others == 1 else 's'}"
    why = f": {printable(sharing['problem'])}" if sharing["problem"] else ""
    return f"its view of other gateways is {sharing['mode']}{why}"
