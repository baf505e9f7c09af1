"""Batches of several gateways: PostgreSQL and S3-compatible storage in place of a folder."""

import asyncio
import functools
import json
import logging
from dataclasses import replace

import openai
import psycopg
import pytest

from hetero_gateway.errors import ConfigError, Refusal
from hetero_gateway.files.batch_lines import LineProblem
from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.lab.load.emulated import write_profile
from hetero_gateway.serve.batches import shared_ledger
from hetero_gateway.serve.batches.database import Database
from hetero_gateway.serve.batches.files import Files
from hetero_gateway.serve.batches.folder import make_folder
from hetero_gateway.serve.batches.ledger import NotOurs
from hetero_gateway.serve.batches.objects import Objects
from hetero_gateway.serve.batches.postgres import PostgresDatabase
from hetero_gateway.serve.batches.shared_ledger import SHARED_SCHEMA, Presence, SharedLedger
from hetero_gateway.serve.batches.shared_store import SharedBatchStore
from hetero_gateway.serve.batches.storage import StorageUnavailable
from tests.fakes.postgres import PASSWORD, PASSWORD_ENV, postgres, postgres_binaries
from tests.fakes.running import FAST, eventually
from tests.fakes.s3 import KEYS, fake_bucket
from tests.fakes.vllm import FakeInstance
from tests.serve.batches.rigs import batch_rig, jsonl, line
from tests.serve.batches.several import MemoryBlobs
from tests.serve.batches.test_ends import LINES, answer, validated

missing = pytest.mark.skipif(postgres_binaries() is None, reason="PostgreSQL is not installed")


def over_postgres(test):
    return pytest.mark.system(missing(test))


class OneOfSeveral:
    """A gateway of several, in one thread."""

    def __init__(self, rows, blobs, name, **config):
        config = BatchesConfig(directory="unused", **config)
        self.database, self.blobs, self.name = rows, blobs, name
        self.files = Files(rows, blobs, config)
        self.ledger = SharedLedger(rows, blobs, config, name)
        self.presence = Presence(rows, name)
        self.presence.renew({})

    def upload(self, data, owner=""):
        incoming = self.files.begin(owner)
        incoming.write(data)
        return self.files.add(owner, incoming, "in.jsonl", None)["id"]

    def create(self):
        file_id = self.upload(jsonl(line(i) for i in range(LINES)))
        return self.ledger.create("", file_id, None, ("24h", 86400.0), {})[1]

    def begin(self):
        batch = self.create()
        assert self.ledger.claim(batch)
        assert validated(self, batch)
        return self.running()

    def running(self):
        (batch,) = self.ledger.unfinished()
        return batch

    def told(self, file_id):
        return [json.loads(text) for text in self.blobs.kept[file_id].splitlines()]


@pytest.fixture(scope="module")
def server():
    with postgres() as server:
        yield server


def empty(server):
    """A database without anything of ours. Returns what opens it."""
    with psycopg.connect(server.url, password=PASSWORD, autocommit=True) as db:
        db.execute("DROP SCHEMA IF EXISTS hetero_gateway_batches CASCADE")
    rows = PostgresDatabase(server.url, PASSWORD)
    rows.prepare()
    rows.close()
    return lambda: PostgresDatabase(server.url, PASSWORD)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=(pytest.mark.system, missing))])
def several(request, tmp_path, monkeypatch):
    """Gateways over one database. SQLite stands for PostgreSQL where that is not installed."""
    if request.param == "sqlite":
        make_folder(tmp_path)
        first = Database(tmp_path)
        first._db.executescript(SHARED_SCHEMA)
        first.close()
        connect = functools.partial(Database, tmp_path)
    else:
        connect = empty(request.getfixturevalue("server"))
    blobs, ahead_s, made = MemoryBlobs(), 0.0, []

    def make(name, **config):
        made.append(OneOfSeveral(connect(), blobs, name, **config))
        return made[-1]

    def later(seconds):
        nonlocal ahead_s
        ahead_s += seconds

    for kind in (Database, PostgresDatabase):
        monkeypatch.setattr(kind, "now_s", lambda _: 1e9 + ahead_s)
    yield make, later
    for each in made:
        each.ledger.close()
        each.database.close()


def check_whole(gateway, batch, repeated=0, status="completed"):
    """Each line is answered once."""
    document = gateway.ledger.document("", batch.id)
    assert (document["status"], document["repeated_lines"]) == (status, repeated)
    ids = [document["output_file_id"], document["error_file_id"]]
    told = [each for file_id in ids if file_id for each in gateway.told(file_id)]
    assert sorted(each["custom_id"] for each in told) == sorted(f"c{i}" for i in range(LINES))
    counts = document["request_counts"]
    assert counts["completed"] + counts["failed"] == counts["total"] == LINES
    for file_id in filter(None, ids):
        assert gateway.files.document("", file_id)["bytes"] == len(gateway.blobs.kept[file_id])
    for table in ("lines", "answers"):
        assert gateway.database.number(f"SELECT COUNT(*) FROM {table}") == 0
    return told


def answer_all(gateway, batch):
    lines = gateway.ledger.next_lines(batch, "m", 100)
    bodies = gateway.ledger.turn([], lines)
    gateway.ledger.turn(
        [answer(each) for each, body in zip(lines, bodies, strict=True) if body is not None], []
    )


def test_two_gateways_share_the_lines_of_a_batch(several):
    make, _ = several
    a, b = make("a"), make("b")
    batch = a.begin()
    (same,), there, _ = b.ledger.progress([], False)
    assert (same.id, there) == (batch.id, {batch.seq})
    ours, theirs = a.ledger.next_lines(batch, "m", 5), b.ledger.next_lines(same, "m", 100)
    assert (len(ours), len(theirs)) == (5, LINES - 5)
    assert {each.number for each in ours}.isdisjoint(each.number for each in theirs)
    assert a.ledger.next_lines(batch, "m", 5) == []
    for gateway, lines in ((a, ours), (b, theirs)):
        assert None not in gateway.ledger.turn([], lines)
    a.ledger.turn([answer(each) for each in ours], [])
    # It does not end while another one has lines of it out.
    assert not a.ledger.finish(batch, "completed")
    assert not a.ledger.finish(batch, "cancelled")
    b.ledger.turn([answer(each, 400) for each in theirs], [])
    assert a.ledger.progress([batch], True).done_elsewhere == LINES - 5
    assert (batch.completed, batch.failed, batch.waiting, batch.left) == (5, LINES - 5, {}, {})
    assert a.ledger.finish(batch, "completed")
    assert b.ledger.progress([same], False) == ([], set(), 0)
    check_whole(a, batch)


def test_lines_of_a_gateway_that_is_gone_go_on_elsewhere_and_say_so(several):
    make, later = several
    a, b = make("a"), make("b")
    batch = a.begin()
    a.ledger.turn([], a.ledger.next_lines(batch, "m", 4)[:3])
    (same,), _, _ = b.ledger.progress([], False)
    later(5)
    b.presence.renew({})
    assert b.ledger.reclaim() == 0
    later(6)
    assert b.ledger.reclaim() == 3
    answer_all(b, same)
    assert b.ledger.finish(same, "completed")
    told = check_whole(b, batch, repeated=3)
    assert sum(each.get("repeated", False) for each in told) == 3


def test_of_two_answers_the_first_one_is_kept(several):
    """A gateway that was slow, not gone, answers what another one has sent again."""
    make, later = several
    a, b = make("a"), make("b")
    batch = a.begin()
    lines = a.ledger.next_lines(batch, "m", LINES)
    a.ledger.turn([], lines[:6])
    (same,), _, _ = b.ledger.progress([], False)
    later(11)
    b.presence.renew({})
    assert b.ledger.reclaim() == 6
    again = b.ledger.next_lines(same, "m", 100)
    assert len(again) == LINES
    b.ledger.turn([], again)
    a.presence.renew({})
    # What it held and had not sent is the other's; what it had sent is answered by both.
    assert a.ledger.turn([], lines[6:]) == [None] * (LINES - 6)
    a.ledger.turn([answer(each) for each in lines[:3]], [])
    b.ledger.turn([answer(each) for each in again], [])
    a.ledger.turn([answer(each) for each in lines[3:6]], [])
    assert (batch.completed, same.completed) == (3, LINES - 3)
    a.ledger.progress([batch], False)
    assert a.ledger.finish(batch, "completed")
    told = check_whole(a, batch, repeated=6)
    assert sum(each.get("repeated", False) for each in told) == 6


@pytest.mark.parametrize("step", ["errors", "files", "rows"])
def test_who_ends_in_the_midst_of_ending_a_batch_is_followed(several, monkeypatch, step):
    make, later = several
    a, b = make("a"), make("b")
    batch = a.begin()
    lines = a.ledger.next_lines(batch, "m", 5)
    a.ledger.turn([], lines)
    a.ledger.turn([answer(each) for each in lines], [])
    (same,), _, _ = b.ledger.progress([], False)
    a.ledger.cancel("", batch.id)
    method = {"errors": "_unsent", "files": "_write_files", "rows": "_keep_files"}[step]

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(a.ledger, method, killed)
        with pytest.raises(KeyboardInterrupt):
            a.ledger.finish(batch, "cancelled")
    b.ledger.progress([same], False)
    assert (same.status, same.outcome) == ("finalizing", "cancelled")
    assert not b.ledger.finish(same, "cancelled")
    later(11)
    b.presence.renew({})
    b.ledger.reclaim()
    assert b.ledger.finish(same, "expired")
    told = check_whole(b, batch, status="cancelled")
    assert sum(each["error"] is not None for each in told) == LINES - 5
    # The first one was slow, and goes on: nothing changes.
    a.presence.renew({})
    a.ledger.finish(batch, "cancelled")
    check_whole(b, batch, status="cancelled")


def test_lines_that_nobody_looks_at_any_more_are_looked_at_elsewhere(several):
    make, later = several
    a, b = make("a"), make("b")
    batch = a.create()
    assert a.ledger.claim(batch)
    a.ledger.begin_lines(batch)
    assert b.ledger.unlooked() == []
    assert not b.ledger.claim(batch)
    later(11)
    b.presence.renew({})
    (found,) = b.ledger.unlooked()
    assert b.ledger.claim(found)
    for slow in (
        lambda: a.ledger.add_lines(batch, []),
        lambda: a.ledger.begin(batch, 1),
        lambda: a.ledger.fail(batch, []),
    ):
        with pytest.raises(NotOurs):
            slow()
    assert validated(b, found)
    same = b.running()
    answer_all(b, same)
    assert b.ledger.finish(same, "completed")
    check_whole(b, batch)


def test_bad_lines_become_a_file_of_errors(several):
    make, _ = several
    a = make("a")
    batch = a.create()
    assert a.ledger.claim(batch)
    assert not validated(a, batch, lambda _: LineProblem("bad", "It is bad."))
    document = a.ledger.document("", batch.id)
    assert document["status"] == "failed"
    assert len(a.told(document["error_file_id"])) == LINES
    assert a.database.number("SELECT COUNT(*) FROM answers") == 0


def test_lines_that_are_let_go_are_anybodys(several):
    make, _ = several
    a, b = make("a"), make("b")
    batch = a.begin()
    lines = a.ledger.next_lines(batch, "m", 100)
    a.ledger.turn([], lines[:2])
    a.ledger.let_go(lines)
    assert len(b.ledger.next_lines(batch, "m", 100)) == LINES - 2


def test_quotas_are_of_all_gateways(several):
    make, _ = several
    a, b = make("a", max_key_bytes=4096), make("b", max_key_bytes=4096)
    a.upload(b"x" * 3000)
    incoming = b.files.begin("")
    with pytest.raises(Refusal, match="more than 4096 bytes"):
        incoming.write(b"x" * 3000)


def test_what_gateways_say_is_heard_while_they_are_there(several):
    make, later = several
    a, b = make("a"), make("b")
    a.presence.renew({"http://one": [1, 2, 3, 4, 5, 6]})
    assert b.presence.renew({}) == {"a": '{"http://one":[1,2,3,4,5,6]}'}
    later(11)
    assert b.presence.renew({}) == {}
    b.presence.end()
    assert a.presence.renew({}) == {}
    assert shared_ledger.gateway_name() != shared_ledger.gateway_name()


# Over real storage


@pytest.fixture
def bucket(monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with fake_bucket() as bucket:
        yield bucket


@pytest.fixture
def shared(server, bucket, monkeypatch):
    """The section of gateways that share."""
    empty(server)
    monkeypatch.setenv(PASSWORD_ENV, PASSWORD)
    return {
        "directory": None,
        "database": server.url,
        "password_env": PASSWORD_ENV,
        "storage": "s3://bucket/some/prefix",
        "storage_endpoint": bucket.url,
    }


@over_postgres
async def test_two_gateways_over_postgres_and_s3(shared, bucket, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    # So few at a time that what one instance and its gateway hold is not all.
    few = replace(load_profile(FAST), max_num_seqs=20)
    write_profile(few, tmp_path / "few.yaml")
    profiles = (str(tmp_path / "few.yaml"),)
    async with (
        batch_rig(tmp_path, [FakeInstance()], batches=shared, profiles=profiles) as a,
        batch_rig(tmp_path, [FakeInstance()], batches=shared, profiles=profiles) as b,
    ):
        for each in (a, b):
            await eventually(lambda each=each: each.rig.running.gateway.batches.runner is not None)
        ((first,), (second,)) = (each.rig.fakes for each in (a, b))
        first.runs.clear()
        batch = await a.start([line(i) for i in range(100)])
        await eventually(lambda: second.requests)
        first.runs.set()
        ended = await b.ended(batch.id)
        assert ended.status == "completed"
        told = await a.lines_of(ended.output_file_id)
        assert sorted(each["custom_id"] for each in told) == sorted(f"c{i}" for i in range(100))
        assert (first.requests + second.requests, ended.repeated_lines) == (100, 0)
        assert first.requests
        # A file in parts goes to the same place, and away again.
        up = await a.openai.uploads.create(bytes=6, filename="x", mime_type="", purpose="batch")
        parts = [await b.openai.uploads.parts.create(up.id, data=data) for data in (b"abc", b"def")]
        whole = await b.openai.uploads.complete(up.id, part_ids=[each.id for each in parts])
        assert (await a.openai.files.content(whole.file.id)).content == b"abcdef"
        assert bucket.objects[f"some/prefix/{whole.file.id}"] == b"abcdef"
        await a.openai.files.delete(whole.file.id)
        assert len(bucket.objects) == 2
    for secret in (PASSWORD, KEYS["AWS_SECRET_ACCESS_KEY"]):
        assert secret not in caplog.text


@over_postgres
async def test_storage_that_is_away_is_waited_for(shared, server, bucket, tmp_path):
    server.stop()
    async with batch_rig(tmp_path, [FakeInstance()], batches=shared) as there:
        answer = await there.rig.client.get("/v1/batches")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "batches_not_ready")
        batches = there.rig.running.gateway.batches
        server.start()
        await eventually(lambda: batches.runner is not None)
        bucket.down = True
        with pytest.raises(openai.APIStatusError) as refused:
            await there.upload([line(0)])
        assert refused.value.status_code == 503
        bucket.down = False
        batch = await there.start([line(i) for i in range(200)])
        server.stop()
        server.start()
        await eventually(lambda: there.runner.answered["completed"] == 200)
        await asyncio.sleep(10)
        ended = await there.ended(batch.id)
        assert (ended.status, ended.request_counts.completed) == ("completed", 200)


@over_postgres
def test_a_password_that_is_wrong_is_said_and_not_shown(shared, monkeypatch):
    monkeypatch.setenv(PASSWORD_ENV, "wrong pass word")
    store = SharedBatchStore(BatchesConfig(**shared))
    assert not store.take()
    assert "password authentication failed" in store.waits_for
    assert "wrong pass word" not in store.waits_for
    monkeypatch.delenv(PASSWORD_ENV)
    with pytest.raises(ConfigError, match=f"password_env: .*{PASSWORD_ENV} is not set"):
        SharedBatchStore(BatchesConfig(**shared))


@over_postgres
def test_who_may_make_no_schema_takes_one_that_is_there(server):
    with psycopg.connect(server.url, password=PASSWORD, autocommit=True) as db:
        db.execute("DROP SCHEMA IF EXISTS hetero_gateway_batches CASCADE")
        db.execute("DROP ROLE IF EXISTS small")
        db.execute(f"CREATE ROLE small LOGIN PASSWORD '{PASSWORD}'")
        rows = PostgresDatabase(server.url.replace("gateway@", "small@"), PASSWORD)
        with pytest.raises(StorageUnavailable, match="permission denied"):
            rows.prepare()
        db.execute("CREATE SCHEMA hetero_gateway_batches AUTHORIZATION small")
        rows.prepare()
        assert rows.number("SELECT COUNT(*) FROM batches") == 0
        rows.close()
        db.execute("DROP SCHEMA hetero_gateway_batches CASCADE")


@over_postgres
def test_a_database_of_a_newer_gateway_is_left_alone(shared):
    store = SharedBatchStore(BatchesConfig(**shared))
    rows = store.rows()
    rows.run("INSERT INTO version VALUES (99)")
    rows.close()
    with pytest.raises(ConfigError, match="newer version"):
        store.take()


def test_objects_are_whole_or_not_there(bucket):
    objects = Objects("bucket", "some/prefix", bucket.url)
    assert objects.sweep(set()) == 0
    large = bytes(range(256)) * (12 << 12)
    for name, data in (("large", large), ("empty", b"")):
        sink = objects.create(name)
        sink.write(data)
        assert f"some/prefix/{name}" not in bucket.objects
        sink.finish()
        sink.finish()
        assert bucket.objects[f"some/prefix/{name}"] == data
        with objects.open(name) as file:
            assert file.read() == data
    sink.drop()
    assert list(bucket.objects) == ["some/prefix/large"]
    with pytest.raises(FileNotFoundError):
        objects.open("empty")
    # What nobody knows may be another gateway's, for a day.
    assert objects.sweep({"small"}) == 0
    bucket.put_at["some/prefix/large"] -= 2 * 86400
    assert objects.sweep({"large"}) == 0
    assert objects.sweep({"small"}) == 1
    bucket.down = True
    with pytest.raises(StorageUnavailable, match="S3"):
        objects.open("large")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"database": "postgresql://u:hush@h/d", "storage": "s3://bucket"}, "password_env"),
        ({"database": "postgresql://h/d?password=hush", "storage": "s3://bucket"}, "password_env"),
        ({"database": "mysql://u:hush@h/d", "storage": "s3://bucket"}, "postgresql://"),
        ({"database": "postgresql://[h/hush", "storage": "s3://bucket"}, "is not a URL"),
        ({"database": "postgresql://h/d", "storage": "s3://hush@bucket"}, "s3://BUCKET"),
        ({"database": "postgresql://h/d"}, "go together"),
        ({"storage": "s3://bucket"}, "go together"),
        ({"directory": "x", "database": "postgresql://h/d", "storage": "s3://bucket"}, "either"),
        ({"directory": "x", "password_env": "X"}, "go with database"),
        (
            {
                "database": "postgresql://h/d",
                "storage": "s3://bucket",
                "storage_endpoint": "http://k:hush@h",
            },
            "must not carry a user",
        ),
    ],
)
def test_what_does_not_fit_is_said_without_its_secrets(tmp_path, section, said):
    path = tmp_path / "gateway.yaml"
    path.write_text(json.dumps({"batches": section}), "utf-8")
    with pytest.raises(ConfigError) as refused:
        load_gateway_config(path)
    assert said in str(refused.value)
    assert "hush" not in str(refused.value)
    assert "\n" not in str(refused.value)
