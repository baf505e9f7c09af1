"""Ends at any step: what was accepted is there, what was answered is not asked again."""

import json
import os
import shutil
import sqlite3

import msgspec
import pytest

from hetero_gateway.errors import ConfigError, Refusal
from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.serve.batches.database import Database, FolderLock, make_folder
from hetero_gateway.serve.batches.files import Files
from hetero_gateway.serve.batches.ledger import Answer, Estimate, InputLost, Ledger, NewLine
from hetero_gateway.serve.batches.validation import Validation
from tests.serve.batches.rigs import jsonl, line

LINES = 12


class Folder:
    """A folder of batches in one thread, as a gateway has it."""

    def __init__(self, directory, **config):
        make_folder(directory)
        self.directory = directory
        config = BatchesConfig(directory=directory, **config)
        self.database = Database(directory)
        self.files, self.ledger = Files(self.database, config), Ledger(self.database, config)

    def upload(self, data, owner=""):
        incoming = self.files.begin(owner)
        incoming.write(data)
        return self.files.add(owner, incoming, "in.jsonl", None)["id"]

    def begin(self, count=LINES, owner=""):
        file_id = self.upload(jsonl(line(i) for i in range(count)), owner)
        made = self.ledger.create(owner, file_id, None, ("24h", 86400.0), {})
        (batch,) = self.ledger.unfinished_named(made["id"])
        validation = Validation(
            self.ledger, batch, lambda _: Estimate("m", 10, 16, None), 10**6, 10**6, 10**9,
            lambda: False,
        )  # fmt: skip
        with self.database.path(file_id).open("rb") as file:
            assert validation.run(file)
        return self.running()

    def running(self):
        (batch,) = self.ledger.unfinished()
        return batch

    def opened(self):
        """As at a start: swept and recovered."""
        self.database.sweep()
        found = self.ledger.unfinished()
        for batch in found:
            if batch.status != "validating":
                self.ledger.recover(batch)
        return found

    def close(self):
        self.ledger.close()
        self.database.close()


def answer(line_of, status=200):
    body = msgspec.json.encode({"n": line_of.number})
    return Answer(line_of, f"c{line_of.number - 1}", status, "r", body, (10, 3))


def told(folder, file_id):
    path = folder.database.path(file_id)
    return [json.loads(text) for text in path.read_bytes().splitlines()] if path.exists() else []


def steps(folder):
    """A batch from its upload to its end; stops after each write."""
    batch = folder.begin()
    yield
    while not batch.done >= batch.total:
        lines = folder.ledger.next_lines(batch, "m", 5)
        bodies = folder.ledger.turn([], lines)
        assert [each.custom_id for each in bodies] == [f"c{each.number - 1}" for each in lines]
        yield
        answers = [answer(each, 400 if each.number % 4 == 0 else 200) for each in lines]
        folder.ledger.turn(answers[:2], [])
        yield
        folder.ledger.turn(answers[2:], [])
        yield
    folder.ledger.finish(batch, "completed")
    yield


def finish_all(folder):
    """Go on from wherever it was to the end; returns the batch as clients see it."""
    for batch in folder.opened():
        if batch.status == "finalizing":
            folder.ledger.finish(batch, batch.outcome)
            continue
        while lines := folder.ledger.next_lines(batch, "m", 100):
            folder.ledger.turn([], lines)
            folder.ledger.turn([answer(each) for each in lines], [])
        folder.ledger.finish(batch, "completed")
    return folder.ledger.listed("", None, 10)["data"][0]


def check_whole(folder, before):
    """Each line is answered once; what was answered before was not asked again."""
    batch = finish_all(folder)
    lines = []
    for name in ("output_file_id", "error_file_id"):
        if batch[name] is not None:
            assert folder.files.document("", batch[name])["bytes"] > 0
            lines += told(folder, batch[name])
    assert sorted(each["custom_id"] for each in lines) == sorted(f"c{i}" for i in range(LINES))
    counts = batch["request_counts"]
    assert counts["total"] == counts["completed"] + counts["failed"] == LINES
    assert batch["repeated_lines"] == sum(each.get("repeated", False) for each in lines)
    answered = {each["id"]: each for each in lines}
    assert all(answered[each["id"]] == each for each in before)


def journal(directory):
    """What whole answers the files of a folder have."""
    found = []
    for path in (directory / "files").iterdir():
        for text in path.read_bytes().splitlines(keepends=True):
            if text.endswith(b"\n") and b'"batch_req_' in text:
                found.append(json.loads(text))
    return found


def copied(directory, to):
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(directory, to)
    return to


def test_a_kill_after_any_write_loses_and_repeats_nothing(tmp_path):
    folder = Folder(tmp_path / "a")
    for _ in steps(folder):
        again = Folder(copied(tmp_path / "a", tmp_path / "b"))
        check_whole(again, journal(tmp_path / "b"))
        again.close()
    folder.close()


def test_a_torn_log_of_the_database_is_as_if_its_end_was_not_written(tmp_path):
    """The write-ahead log, cut at any place: what it has whole is there, and all goes on."""
    folder = Folder(tmp_path / "a")
    folder.database.run("PRAGMA wal_autocheckpoint=0")
    for number, _ in enumerate(steps(folder)):
        if number == 5:
            break
    log = tmp_path / "a" / "batches.sqlite-wal"
    size = log.stat().st_size
    cuts = [*range(0, size, size // 12), size - 1, size - 4096, size]
    for cut in cuts:
        there = copied(tmp_path / "a", tmp_path / "b")
        with (there / "batches.sqlite-wal").open("r+b") as torn:
            torn.truncate(cut)
        (there / "batches.sqlite-shm").unlink(missing_ok=True)
        again = Folder(there)
        if again.database.number("SELECT COUNT(*) FROM batches") and again.ledger.unfinished():
            (batch,) = again.ledger.unfinished()
            if batch.status == "in_progress":
                check_whole(again, [])
        again.close()
    folder.close()


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_torn_answer_is_asked_again_and_says_so(tmp_path, cut):
    folder = Folder(tmp_path / "a")
    batch = folder.begin()
    lines = folder.ledger.next_lines(batch, "m", 3)
    folder.ledger.turn([], lines)
    # The process ends in the middle of the second answer, before any row says that one is there.
    size = folder.ledger._append([answer(each) for each in lines[:2]])[0]
    folder.close()
    path = folder.database.path(batch.output_file_id)
    with path.open("r+b") as file:
        file.truncate(size - cut)
    again = Folder(tmp_path / "a")
    (batch,) = again.opened()
    assert (batch.completed, batch.repeated) == (1, 2)
    check_whole(again, journal(tmp_path / "a"))
    again.close()


def test_what_is_not_finished_becomes_an_error_of_its_own(tmp_path):
    folder = Folder(tmp_path / "a")
    batch = folder.begin()
    lines = folder.ledger.next_lines(batch, "m", 4)
    folder.ledger.turn([], lines)
    folder.ledger.turn([answer(lines[0])], [])
    folder.ledger.finish(batch, "expired")
    folder.ledger.finish(batch, "expired")
    ended = folder.ledger.document("", batch.id)
    assert ended["status"] == "expired"
    assert ended["request_counts"] == {"total": LINES, "completed": 1, "failed": LINES - 1}
    errors = told(folder, ended["error_file_id"])
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert len({each["custom_id"] for each in errors}) == LINES - 1
    assert folder.database.number("SELECT COUNT(*) FROM lines") == 0
    folder.close()


def test_a_disk_that_is_full_loses_nothing(tmp_path, monkeypatch):
    folder = Folder(tmp_path / "a")
    batch = folder.begin()
    lines = folder.ledger.next_lines(batch, "m", 4)
    folder.ledger.turn([], lines)
    answers = [answer(each) for each in lines]
    real = os.pwrite

    def full(file, data, at):
        real(file, data[:20], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="space"):
        folder.ledger.turn(answers, [])
    monkeypatch.setattr(os, "pwrite", real)
    assert folder.database.path(batch.output_file_id).stat().st_size == 0
    # The answers are here, and the database cannot say so: they are written anew.
    real_run = folder.database.run

    def no_row(sql, *values):
        if sql.startswith("UPDATE batches"):
            raise sqlite3.OperationalError("database or disk is full")
        return real_run(sql, *values)

    monkeypatch.setattr(folder.database, "run", no_row)
    with pytest.raises(sqlite3.OperationalError):
        folder.ledger.turn(answers, [])
    monkeypatch.setattr(folder.database, "run", real_run)
    folder.ledger.turn(answers, [])
    assert batch.completed == 4
    check_whole(folder, journal(tmp_path / "a"))
    folder.close()


def test_a_file_that_is_spoilt_ends_its_batch_and_loses_no_answer(tmp_path):
    folder = Folder(tmp_path / "a")
    batch = folder.begin()
    lines = folder.ledger.next_lines(batch, "m", 2)
    folder.ledger.turn([], lines[:1])
    path = folder.database.path(batch.input_file_id)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(InputLost):
        folder.ledger.turn([answer(lines[0])], lines[1:])
    assert batch.completed == 0
    folder.ledger.turn([answer(lines[0])], [])
    folder.ledger.finish(batch, "failed")
    ended = folder.ledger.document("", batch.id)
    assert ended["request_counts"] == {"total": LINES, "completed": 1, "failed": LINES - 1}
    assert len(told(folder, ended["output_file_id"])) == 1
    folder.close()


def test_lines_go_by_their_beginnings_and_then_by_their_work(tmp_path):
    folder = Folder(tmp_path / "a")
    file_id = folder.upload(b"\n")
    made = folder.ledger.create("", file_id, None, ("24h", 86400.0), {})
    (batch,) = folder.ledger.unfinished_named(made["id"])
    kinds = [(100, None), (10, 7), (300, 7), (20, None), (150, 8), (140, 8)]
    rows = [
        NewLine(n, 0, 0, Estimate("m", tokens, 0, prefix), bytes([n]))
        for n, (tokens, prefix) in enumerate(kinds, 1)
    ]
    folder.ledger.add_lines(batch, rows)
    assert folder.ledger.begin(batch, len(rows))
    (batch,) = folder.ledger.unfinished()
    order = [each.number for each in folder.ledger.next_lines(batch, "m", 10)]
    assert order == [4, 1, 6, 5, 2, 3]
    assert folder.ledger.next_lines(batch, "other", 10) == []
    folder.close()


def test_a_folder_has_one_gateway(tmp_path):
    make_folder(tmp_path / "a")
    first, second = FolderLock(tmp_path / "a"), FolderLock(tmp_path / "a")
    assert first.take()
    assert not second.take()
    first.release()
    assert second.take()
    second.release()


def test_what_is_no_database_is_said(tmp_path):
    make_folder(tmp_path / "a")
    (tmp_path / "a" / "batches.sqlite").write_bytes(b"no database at all, but long enough" * 100)
    with pytest.raises(ConfigError, match=r"batches\.directory: .*not a database"):
        Database(tmp_path / "a")
    make_folder(tmp_path / "b")
    database = Database(tmp_path / "b")
    database.run("PRAGMA user_version=99")
    database.close()
    with pytest.raises(ConfigError, match="newer version"):
        Database(tmp_path / "b")
    (tmp_path / "c").write_text("a file")
    with pytest.raises(ConfigError, match=r"batches\.directory"):
        make_folder(tmp_path / "c")


def test_what_is_old_goes_and_what_is_read_stays(tmp_path):
    folder = Folder(tmp_path / "a", keep_s=1000.0)
    batch = folder.begin()
    folder.upload(b"old")
    folder.files.forget_old(4e9)
    assert [each["id"] for each in folder.files.listed("", None, 10, "asc", None)["data"]] == [
        batch.input_file_id
    ]
    folder.ledger.finish(batch, "cancelled")
    folder.files.forget_old(4e9)
    assert folder.files.listed("", None, 10, "asc", None)["data"] == []
    assert folder.ledger.listed("", None, 10)["data"] == []
    assert list((tmp_path / "a" / "files").iterdir()) == []
    folder.close()


def test_pages(tmp_path):
    folder = Folder(tmp_path / "a")
    ids = [folder.upload(b"x%d" % i) for i in range(5)]
    first = folder.files.listed("", None, 2, "asc", None)
    assert ([each["id"] for each in first["data"]], first["has_more"]) == (ids[:2], True)
    rest = folder.files.listed("", first["last_id"], 10, "asc", "batch")
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (ids[2:], False)
    newest = folder.files.listed("", None, 1, "desc", None)
    assert newest["data"][0]["id"] == ids[-1]
    with pytest.raises(Refusal):
        folder.files.listed("somebody", ids[0], 1, "desc", None)
    folder.close()
