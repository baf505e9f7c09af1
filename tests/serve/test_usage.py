"""What clients have used outlives a gateway, in a file beside the keys."""

import csv
import io
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.gateway.admission.usage import ClientUsage, KeptRow, UsageStoreError
from hetero_gateway.serve.usage.file import UsageFile
from hetero_gateway.serve.usage.keeper import UsageKeeper
from tests.fakes.running import CHAT, chat, eventually, rig
from tests.gateway.admission.test_limits import ADMIN, entry, of, sections_with

A, B, C = (digit * 64 for digit in "abc")
Stores = Callable[[str], Any]


@pytest.fixture(autouse=True)
def _admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY_9", ADMIN["authorization"].removeprefix("Bearer "))


def today() -> int:
    return int(time.time() // 86400)


async def used(store: Any, *, own: bool = False) -> dict[tuple[str, str], tuple[int, ...]]:
    return {(row.client, row.model): row.amounts for row in await store.read(own=own)}


async def check_store(stores: Stores) -> None:
    """Rows of a run are replaced; those of others are added up; odd names are names."""
    one, two, three = map(stores, (A, B, C))
    day = today()
    assert await one.read(own=True) == await one.read(own=False) == []
    many = [KeptRow(day, f"client-{i}", "m", (i, 1, 0, 2)) for i in range(700)]
    await one.save(many)
    await one.save([KeptRow(day, "client-3", "m", (30, 3, 2, 1))])
    await two.save([KeptRow(day, "client-3", "m", (5, 5, 5, 5))])
    await two.save([KeptRow(day - 1, "a@b", "model'); \N{SNOWMAN} drop", (1, 2**50, 0, 1))])
    seen = await used(three)
    assert len(seen) == 701
    assert seen["client-3", "m"] == (35, 8, 7, 6)
    assert seen["a@b", "model'); \N{SNOWMAN} drop"] == (1, 2**50, 0, 1)
    assert (await used(one))["client-3", "m"] == (5, 5, 5, 5)
    assert (await used(one, own=True))["client-3", "m"] == (30, 3, 2, 1)
    for store in (one, two, three):
        store.close()


async def test_a_file_keeps_rows_of_each_run_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.usage.sqlite"
    await check_store(lambda run: UsageFile(path, run))
    assert path.stat().st_mode & 0o777 == 0o600
    # A day more than a month later what is older is gone.
    store = UsageFile(path, C)
    await store.save([KeptRow(today() + 31, "late", "m", (1, 1, 1, 1))])
    assert set(await used(store, own=True)) == {("late", "m")}
    assert await used(store) == {}
    store.close()


class Kept:
    """A store that fails while it is told to."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str, str], KeptRow] = {}
        self.saves = 0
        self.fails = False

    async def save(self, rows: Sequence[KeptRow]) -> None:
        if self.fails:
            raise UsageStoreError("keys.usage.sqlite: the disk is full")
        self.saves += 1
        self.rows |= {row[:3]: row for row in rows}

    async def read(self, *, own: bool) -> list[KeptRow]:
        return list(self.rows.values()) if own else []

    def close(self) -> None:
        pass


async def test_only_what_has_changed_is_written_and_a_failure_is_told_once(caplog) -> None:
    caplog.set_level(logging.INFO)
    usage, store = ClientUsage(), Kept()
    keeper = UsageKeeper(usage, store, lambda: None)
    await keeper.save()
    assert store.saves == 0
    usage.count("a", "m", 10, 0, 5)
    await keeper.save()
    await keeper.save()
    assert store.saves == 1
    usage.count("a", "m", 10, 0, 5)
    store.fails = True
    await keeper.save()
    await keeper.save()
    store.fails = False
    await keeper.save()
    assert [row.amounts for row in store.rows.values()] == [(2, 20, 0, 10)]
    assert [record.message for record in caplog.records] == [
        "clients' usage cannot be saved and would be lost at a restart: keys.usage.sqlite: the "
        "disk is full",
        "clients' usage is saved again",
    ]


async def test_a_process_that_is_started_again_counts_on_and_a_successor_was_told() -> None:
    store = Kept()
    for continues, told in ((False, 0), (False, 1), (True, 2)):
        usage = ClientUsage()
        keeper = UsageKeeper(usage, store, lambda: None)
        if continues:
            keeper._before = {}  # as ``start`` has it
        for _ in range(1 + told if continues else 1):
            usage.count("a", "m", 10, 0, 5)
        await keeper.save()
    assert [row.amounts for row in store.rows.values()] == [(3, 30, 0, 15)]


@asynccontextmanager
async def served(directory: Path, **sections: Any) -> AsyncIterator[Any]:
    more = sections_with(directory, entry("a")) | sections
    async with rig(**more) as (running, client, _):
        answer = await client.post(CHAT, json=chat(), headers=of("a"))
        assert answer.status_code == 200
        await eventually(running.settled)
        yield client


async def rows(client: Any) -> list[dict[str, str]]:
    answer = await client.get("/admin/usage", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return list(csv.DictReader(io.StringIO(answer.text)))


async def test_usage_goes_on_after_a_restart_and_counters_begin_anew(tmp_path: Path) -> None:
    for starts in (1, 2, 3):
        async with served(tmp_path) as client:
            (row,) = await rows(client)
            assert (row["client"], row["requests"]) == ("a", str(starts))
            (shown,) = (await client.get("/admin/clients", headers=ADMIN)).json()["clients"]
            assert shown["usage"]["requests"] == 1
    database = sqlite3.connect(tmp_path / "keys.usage.sqlite")
    assert database.execute("SELECT count(*), sum(requests) FROM usage").fetchall() == [(3, 3)]
    database.close()


async def test_off_keeps_nothing_and_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    file = tmp_path / "keys.usage.sqlite"
    clients = {"keys_file": str(tmp_path / "keys.yaml"), "usage_file": "off"}
    async with served(tmp_path, clients=clients) as client:
        assert len(await rows(client)) == 1
    assert not file.exists()
    file.write_text("not a database, but a note that is long enough to be read as one")
    async with served(tmp_path) as client:
        answer = await client.get("/admin/usage", headers=ADMIN)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "usage_unavailable")
        assert f"{file}: file is not a database" in error["message"]
