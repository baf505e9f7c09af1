"""Progress on standard error: a bar on a terminal, one line per run elsewhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hetero_gateway.lab.load.result import RequestRecord

# The load generator shares its core with the measured servers, so the bar is drawn rarely.
_REFRESH_S = 0.25


class Counter:
    """Counts records; ``add`` is what ``replay`` calls."""

    def __init__(self) -> None:
        self.done = 0
        self.errors = 0

    def add(self, record: RequestRecord) -> None:
        self.done += 1
        self.errors += record.error is not None


def progress_bar(console: Console) -> Progress:
    """A bar whose tasks ``watch`` keeps up to date; draws nothing without a terminal."""
    return Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        disable=not console.is_terminal,
    )


@contextlib.asynccontextmanager
async def watch(progress: Progress, description: str, total: int) -> AsyncIterator[Counter]:
    """Show a run of ``total`` requests while the body runs; yields the counter."""
    counter = Counter()
    task_id = progress.add_task(description, total=total, note="")

    def draw() -> None:
        note = f"{counter.errors} failed" if counter.errors else ""
        progress.update(task_id, completed=counter.done, note=note, refresh=True)

    async def redraw() -> None:
        while True:
            draw()
            await asyncio.sleep(_REFRESH_S)

    async with asyncio.TaskGroup() as tasks:
        drawing = tasks.create_task(redraw())
        try:
            yield counter
        finally:
            drawing.cancel()
            draw()
            progress.stop_task(task_id)
    if progress.disable:
        failed = f", {counter.errors} failed" if counter.errors else ""
        progress.console.print(f"{description}: {counter.done} of {total} requests{failed}")
