"""Ends at any step: what was accepted is there, what was answered is not asked again."""

import contextlib
import json
import os
import shutil
import sqlite3

import msgspec
import pytest

from hetero_gateway.errors import ConfigError, Refusal
from hetero_gateway.files.batch_lines import LineProblem
from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.serve.batches.database import Database
from hetero_gateway.serve.batches.files import Files
from hetero_gateway.serve.batches.folder import Folder, FolderLock, make_folder
from hetero_gateway.serve.batches.folder_ledger import FolderLedger
from hetero_gateway.serve.batches.ledger import Answer, Estimate, InputLost, NewLine
from hetero_gateway.serve.batches.validation import Validation
from tests.serve.batches.rigs import jsonl, line

LINES = 12


class OneGateway:
    """A folder of batches in one thread, as a gateway has it."""

    def __init__(self, directory, **config):
        make_folder(directory)
        self.directory = directory
        config = BatchesConfig(directory=directory, **config)
        self.database = Database(directory)
        self.blobs = Folder(directory)
        self.files = Files(self.database, self.blobs, config)
        self.ledger = FolderLedger(self.database, self.blobs, config)

    def upload(self, data, owner=""):
        incoming = self.files.begin(owner)
        incoming.write(data)
        return self.files.add(owner, incoming, "in.jsonl", None)["id"]

    def begin(self, count=LINES, owner=""):
        file_id = self.upload(jsonl(line(i) for i in range(count)), owner)
        _, batch = self.ledger.create(owner, file_id, None, ("24h", 86400.0), {})
        assert validated(self, batch)
        return self.running()

    def running(self):
        (batch,) = self.ledger.unfinished()
        return batch

    def opened(self):
        """As at a start: swept and recovered."""
        self.files.sweep()
        found = self.ledger.unfinished()
        for batch in found:
            if batch.total:
                self.ledger.recover(batch)
        return found

    def close(self):
        self.ledger.close()
        self.database.close()


def answer(line_of, status=200):
    body = msgspec.json.encode({"n": line_of.number})
    return Answer(line_of, f"c{line_of.number - 1}", status, "r", body, (10, 3))


def told(folder, file_id):
    path = folder.blobs.path(file_id)
    return [json.loads(text) for text in path.read_bytes().splitlines()] if path.exists() else []


def validated(folder, batch, judge=lambda _: Estimate("m", 10, 16, None), most_key_lines=10**9):
    most = 10**6, 10**6, most_key_lines
    validation = Validation(folder.ledger, batch, judge, *most, lambda: False)
    with folder.blobs.open(batch.input_file_id) as file:
        return validation.run(file)


def finish_all(folder):
    """Go on from wherever it was to the end, as a start does."""
    for batch in folder.opened():
        if not batch.total:
            validated(folder, batch)
            found = folder.ledger.unfinished_named(batch.id)
            if not found:
                continue
            (batch,) = found
        outcome = batch.outcome or ("cancelled" if batch.status == "cancelling" else None)
        while outcome is None and (lines := folder.ledger.next_lines(batch, "m", 100)):
            folder.ledger.turn([], lines)
            folder.ledger.turn([answer(each) for each in lines], [])
        folder.ledger.finish(batch, outcome or "completed")


def check_whole(folder, before, accepted=()):
    """What was accepted is there, each line is answered once, and no answer was asked for again."""
    finish_all(folder)
    files = {each["id"]: each for each in folder.files.listed("", None, 99, "asc", None)["data"]}
    batches = folder.ledger.listed("", None, 99)["data"]
    ids = {*files, *(each["id"] for each in batches)}
    assert {each for each in accepted if not each.startswith("upload_")} <= ids
    for each in accepted:
        if each.startswith("upload_"):
            assert folder.files.upload("", each)["status"] in ("pending", "completed")
    for file_id, each in files.items():
        assert folder.blobs.path(file_id).stat().st_size == each["bytes"]
    answers = {}
    for batch in batches:
        if batch["status"] == "failed":
            continue
        names = batch["output_file_id"], batch["error_file_id"]
        lines = [each for name in names if name for each in told(folder, name)]
        wanted = sorted(f"c{i}" for i in range(LINES))
        assert sorted(each["custom_id"] for each in lines) == wanted
        counts = batch["request_counts"]
        assert counts["total"] == counts["completed"] + counts["failed"] == LINES
        said = sum(each.get("repeated", False) for each in lines)
        assert said <= batch["repeated_lines"]
        assert said == batch["repeated_lines"] or batch["status"] == "cancelled"
        answers |= {each["id"]: each for each in lines}
    assert all(answers[each["id"]] == each for each in before)


def journal(directory):
    """What whole answers the files of a folder have."""
    found = []
    for path in (directory / "files").iterdir():
        for text in path.read_bytes().splitlines(keepends=True):
            if text.endswith(b"\n") and b'"batch_req_' in text:
                found.append(json.loads(text))
    return [each for each in found if each["response"]]


def copied(directory, to):
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(directory, to)
    return to


def story(folder, accepted):
    """Everything that is ever written; ``accepted``: what its client has heard of."""
    data = jsonl(line(i) for i in range(LINES))
    accepted.add(upload := folder.files.begin_upload("", "in.jsonl", len(data))["id"])
    parts = []
    for piece in (data[:100], data[100:]):
        incoming = folder.files.begin_part("", upload)
        incoming.write(piece)
        parts.append(folder.files.add_part("", upload, incoming)["id"])
    joining = folder.files.begin_joining("", upload, parts)
    joining.run()
    accepted.add(whole := folder.files.end_joining("", upload, joining)["file"]["id"])
    left = folder.files.begin_upload("", "in.jsonl", 9)["id"]
    folder.files.cancel_upload("", left)
    accepted.add(folder.upload(data))

    made, spoilt = folder.ledger.create("", whole, None, ("24h", 86400.0), {})
    accepted.add(made["id"])
    assert not validated(folder, spoilt, lambda _: LineProblem("bad", "It is bad."))

    for end in ("completed", "cancelled"):
        made, batch = folder.ledger.create("", whole, None, ("24h", 86400.0), {})
        accepted.add(made["id"])
        assert validated(folder, batch)
        batch = folder.running()
        while lines := folder.ledger.next_lines(batch, "m", 6):
            folder.ledger.turn([], lines)
            answers = [answer(each, 400 if each.number % 4 == 0 else 200) for each in lines]
            folder.ledger.turn(answers[:2], [])
            if end == "cancelled":
                folder.ledger.cancel("", batch.id)
                break
            folder.ledger.turn(answers[2:], [])
        folder.ledger.finish(batch, end)

    accepted -= {whole, upload}
    folder.files.delete("", whole)
    accepted.clear()
    folder.files.forget_old(4e9)


def test_an_end_at_any_write_loses_and_repeats_nothing(tmp_path, monkeypatch):
    """Of all that is ever written: before it, in the midst of it, and behind it."""
    directory, accepted, tried = tmp_path / "a", set(), 0
    log = directory / "batches.sqlite-wal"
    looking, real_write, real = False, os.pwrite, Database.transaction

    def look(cut=None):
        """As another process finds the folder now. ``cut``: of the log, that is torn."""
        nonlocal looking, tried
        looking, tried = True, tried + 1
        there = copied(directory, tmp_path / "b")
        if cut is not None:
            os.truncate(there / log.name, cut)
        (there / "batches.sqlite-shm").unlink(missing_ok=True)
        again = OneGateway(there)
        again.database.run("PRAGMA synchronous=OFF")
        check_whole(again, journal(there) if accepted else [], accepted)
        again.close()
        looking = False

    @contextlib.contextmanager
    def transaction(database):
        with real(database):
            before = log.stat().st_size if log.exists() else 0
            yield
        if not looking:
            size = log.stat().st_size
            cuts = (before + size) // 2, size - 1, size
            for cut in cuts if size > before else [size]:
                look(cut)

    def write(file, data, at):
        if looking or len(data) < 2:
            return real_write(file, data, at)
        done = real_write(file, data[: len(data) // 2], at)
        look()
        return done

    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(Database, "transaction", transaction)
    folder = OneGateway(directory)
    folder.database.run("PRAGMA wal_autocheckpoint=0")
    story(folder, accepted)
    folder.close()
    assert tried > 80, tried


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_torn_answer_is_asked_again_and_says_so(tmp_path, cut):
    folder = OneGateway(tmp_path / "a")
    batch = folder.begin()
    lines = folder.ledger.next_lines(batch, "m", 3)
    folder.ledger.turn([], lines)
    # The process ends in the middle of the second answer, before any row says that one is there.
    size = folder.ledger._append([answer(each) for each in lines[:2]])[0]
    folder.close()
    path = folder.blobs.path(batch.output_file_id)
    with path.open("r+b") as file:
        file.truncate(size - cut)
    again = OneGateway(tmp_path / "a")
    (batch,) = again.opened()
    assert (batch.completed, batch.repeated) == (1, 2)
    check_whole(again, journal(tmp_path / "a"))
    again.close()


def test_what_is_not_finished_becomes_an_error_of_its_own(tmp_path):
    folder = OneGateway(tmp_path / "a")
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
    folder = OneGateway(tmp_path / "a")
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
    assert folder.blobs.path(batch.output_file_id).stat().st_size == 0
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
    folder = OneGateway(tmp_path / "a")
    batch = folder.begin()
    lines = folder.ledger.next_lines(batch, "m", 2)
    folder.ledger.turn([], lines[:1])
    path = folder.blobs.path(batch.input_file_id)
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
    folder = OneGateway(tmp_path / "a")
    file_id = folder.upload(b"\n")
    _, batch = folder.ledger.create("", file_id, None, ("24h", 86400.0), {})
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
    folder = OneGateway(tmp_path / "a", keep_s=1000.0)
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
    folder = OneGateway(tmp_path / "a")
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


def test_quotas_are_of_each_key(tmp_path):
    """Of bytes with what comes in and is answered, of lines to do, of batches that run."""
    folder = OneGateway(tmp_path / "a", max_key_bytes=8000, max_key_batches=2)
    most_key_lines = 2 * LINES - 1
    batch = folder.begin(owner="one")
    file_id = batch.input_file_id
    # Lines: those of all its batches that are not done. Others have their own.
    _, second = folder.ledger.create("one", file_id, None, ("24h", 86400.0), {})
    with pytest.raises(Refusal, match="2 batches that are not over") as refused:
        folder.ledger.create("one", file_id, None, ("24h", 86400.0), {})
    assert refused.value.status == 429
    assert not validated(folder, second, most_key_lines=most_key_lines)
    (problem,) = folder.ledger.document("one", second.id)["errors"]["data"]
    assert "more than 23 lines to do" in problem["message"]
    lines = folder.ledger.next_lines(batch, "m", 1)
    folder.ledger.turn([], lines)
    folder.ledger.turn([answer(each) for each in lines], [])
    _, third = folder.ledger.create("one", file_id, None, ("24h", 86400.0), {})
    assert validated(folder, third, most_key_lines=most_key_lines)
    other = folder.upload(jsonl(line(i) for i in range(LINES)), "other")
    _, theirs = folder.ledger.create("other", other, None, ("24h", 86400.0), {})
    assert validated(folder, theirs, most_key_lines=most_key_lines)
    # Bytes: of files, of answers that are written yet, of parts, and of what is on its way.
    answered = folder.blobs.path(batch.output_file_id).stat().st_size
    coming = folder.files.begin("one")
    coming.write(b"x" * 1000)
    upload = folder.files.begin_upload("one", "x", 2000)["id"]
    part = folder.files.begin_part("one", upload)
    part.write(b"x" * 1000)
    folder.files.add_part("one", upload, part)
    files = folder.files.listed("one", None, 99, "asc", None)["data"]
    left = 8000 - sum(each["bytes"] for each in files) - answered - 2000
    last = folder.files.begin("one")
    with pytest.raises(Refusal, match="more than 8000 bytes"):
        last.write(b"x" * (left + 1))
    last.write(b"x" * left)
    for each in (coming, last):
        folder.files.drop(each)
    assert folder.upload(b"x" * 1000, "one")
    assert folder.upload(b"x" * 5000, "other")
    folder.close()
