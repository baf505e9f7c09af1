"""A real Envoy with the shipped configuration whose picker does not answer: who is served, and what
reaches an instance."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hpack import Decoder, Encoder

from benchmarks.envoy import (
    GUARD,
    HEADER_MUTATION,
    configuration,
    ext_proc,
    http_filter,
    manager,
    with_keys_file,
)
from hetero_gateway.cli import main
from hetero_gateway.engines.vllm.fields import GUARDED_HEADERS, guarded_at
from hetero_gateway.engines.vllm.paths import ENGINE_CALLS, RESPONSES, WORK_BY_PATH
from hetero_gateway.files.client_keys import MOST_KEY_BYTES, hash_of
from tests.fakes import ext_procs
from tests.fakes.envoy import Envoy, PickerProcess, full_duplex, running_envoy, until_picked
from tests.fakes.gateway_files import write
from tests.fakes.raw import RawInstance

pytestmark = [pytest.mark.system, pytest.mark.slow]

CHAT = "/v1/chat/completions"
RIGHT, OTHER, EXPIRED, UNDER_A_SECRET, OF_ONE_MODEL = (
    f"hg-{name}-0123456789abcdef" for name in ("right", "other", "expired", "hmac", "model")
)
SHARED = "shared"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()


class Witness(RawInstance):
    """An instance that keeps what came through Envoy; the picker's probes come from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[str] = []
        self.bodies: list[bytes] = []

    async def _plainly(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if b"x-forwarded-proto:" in head.lower():
            self.heads.append(head.decode("latin-1"))
            self.bodies.append(body)
        return await super()._plainly(head, body, writer)


@pytest.fixture
async def instance() -> AsyncIterator[Witness]:
    async with Witness() as made:
        yield made


def write_gateway(folder: Path, port: int, **changes: Any) -> Path:
    """The picker's configuration, with keys of every kind."""
    folder.mkdir(exist_ok=True)
    now_s = time.time()
    moments = {"expired": now_s - 3600, "right": now_s + 3600}
    keys: list[dict[str, Any]] = [
        {
            "name": name,
            "hash": hash_of(key),
            "expires": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moments[name])),
        }
        for name, key in (("right", RIGHT), ("expired", EXPIRED))
    ]
    keys.append({"name": "hmac", "hash": hash_of(UNDER_A_SECRET, "pepper" * 20)})
    keys.append({"name": "bound", "hash": hash_of(OF_ONE_MODEL), "models": ["m"]})
    write(folder / "keys.yaml", {"keys": keys})
    document = {
        "server": {"api_key_env": "ENVOY_TEST_SHARED"},
        "clients": {"keys_file": "keys.yaml", "hash_key_env": "ENVOY_TEST_PEPPER"},
        "health": {"probe_interval_s": 0.1},
        "instances": [{"id": "i0", "base_url": f"http://127.0.0.1:{port}"}],
    } | changes
    return write(folder / "gateway.yaml", document)


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVOY_TEST_SHARED", SHARED)
    # Longer than a block of SHA-256, which HMAC hashes first.
    monkeypatch.setenv("ENVOY_TEST_PEPPER", "pepper" * 20)
    monkeypatch.setenv("ENVOY_TEST_INSTANCE", "of-the-instance")


def write_keys(folder: Path, gateway: Path, *flags: str) -> Path:
    path = folder / "envoy.keys"
    assert main(["key", "envoy", "-c", str(gateway), "-o", str(path), *flags]) == 0
    return path


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


async def ask(
    envoy: Envoy,
    target: str = CHAT,
    headers: tuple[str, ...] = (),
    *,
    method: str = "POST",
    body: bytes = BODY,
    version: str = "1.1",
) -> Answer:
    """One request, byte for byte; status 0: the connection ended without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(envoy.url.rsplit(":", 1)[1]))
    lines = [
        f"{method} {target} HTTP/{version}",
        *("host: x", "connection: close", f"content-length: {len(body)}"),
        *("content-type: application/json", *headers),
    ]
    try:
        async with asyncio.timeout(30):
            writer.write("".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1") + body)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            said = await reader.readexactly(int(length[1]) if length and method != "HEAD" else 0)
            return Answer(int(head.split(b" ")[1]), said)
    except (ConnectionError, asyncio.IncompleteReadError):
        return Answer(0, b"")
    finally:
        writer.close()


def bearer(key: str) -> tuple[str]:
    return (f"Authorization: Bearer {key}",)


# (fields, whether their key opens) with the file of keys that ``write_keys`` makes.
KEYS: list[tuple[tuple[str, ...], bool]] = [
    ((), False),
    (bearer("wrong-0123456789abcdef"), False),
    (bearer(""), False),
    (bearer(RIGHT + "x"), False),
    (bearer(RIGHT[:-1]), False),
    (("authorization: " + RIGHT,), False),
    (("authorization: Basic " + RIGHT,), False),
    (bearer(EXPIRED), False),
    (bearer("x" * 60_000), False),
    # By what is kept of it, nobody gets in.
    (bearer(hash_of(RIGHT)), False),
    (bearer(hash_of(RIGHT).partition(":")[2]), False),
    (bearer(OF_ONE_MODEL), False),
    # Fields that a client must not be able to decide by.
    (("x-gateway-destination-endpoint: 127.0.0.1:1",), False),
    (("x-hetero-gateway-ticket: 1", "hetero_gateway: ticket"), False),
    (bearer(RIGHT), True),
    ((f"AUTHORIZATION: bEaReR {RIGHT}",), True),
    ((f"x-api-key: {RIGHT}",), True),
    ((f"X-Api-Key: {UNDER_A_SECRET}",), True),
    (bearer(SHARED), True),
    (("x-api-key: wrong", f"x-api-key: {RIGHT}"), True),
    (("authorization: Bearer wrong", f"x-api-key: {RIGHT}"), True),
]
ODD_PATHS = (
    *("//sleep", "/sleep/", "/sleep?level=1", "/SLEEP", "/%73leep", "/v1/%2e%2e/sleep"),
    *(f"{CHAT}/../../../sleep", f"{CHAT}/..%2f..%2f..%2fsleep", f"{CHAT}/..%252f..%252fsleep"),
    *(f"{CHAT}\\..\\..\\..\\sleep", f"{CHAT};/../../../sleep", f"{CHAT}/", f"{CHAT};a=b"),
    *(f"{CHAT}%3f", f"{CHAT}%00", f"{CHAT}#/sleep", "/v1/Chat/completions", "/v1/chat/completion"),
    *("http://x/sleep", "http://x/v1/load_lora_adapter", "*", "sleep"),
)
# None of them may reach an instance, with a key or without one.
OFF_THE_LIST: list[tuple[str, str]] = [
    *((method, path) for path, method in ENGINE_CALLS.items()),
    *(("GET", path) for path in ("/metrics", "/health", "/ping", "/version", "/docs", "/", CHAT)),
    *((method, "/v1/responses/resp_1") for method in ("GET", "DELETE", "POST")),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("GET", "/tokenizer_info"),
    *((method, "/v1/realtime") for method in ("GET", "POST")),
    ("POST", "/v1/models"),
    *(("POST", path) for path in ODD_PATHS),
    *((method, CHAT) for method in ("PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "post", "TRACE")),
]


async def assert_off_the_list_is_refused(envoy: Envoy, instance: Witness) -> None:
    before = len(instance.heads)
    asked = [(key, *each) for key in ((), bearer(RIGHT)) for each in OFF_THE_LIST]
    answers = await asyncio.gather(
        *(ask(envoy, target, key, method=method) for key, method, target in asked)
    )
    for one, answer in zip(asked, answers, strict=True):
        assert answer.status in (400, 403, 404, 405, 0), (one, answer)
    assert len(instance.heads) == before


def assert_no_credentials(instance: Witness) -> None:
    for head in instance.heads:
        assert head.startswith(f"POST {CHAT} HTTP/1.1\r\n")
        lowered = head.lower()
        for word in (RIGHT, SHARED, UNDER_A_SECRET, "authorization", "x-api-key"):
            assert word not in lowered


async def assert_guarded(envoy: Envoy, instance: Witness) -> None:
    """What must hold, whatever is the matter with the picker."""
    answers = await asyncio.gather(*(ask(envoy, headers=headers) for headers, _ in KEYS))
    for (headers, opens), answer in zip(KEYS, answers, strict=True):
        assert answer.status == (200 if opens else 401), (headers, answer)
        assert opens or answer.code == "invalid_api_key"
    assert len(instance.heads) == sum(opens for _, opens in KEYS)
    await assert_off_the_list_is_refused(envoy, instance)
    assert_no_credentials(instance)
    assert set(instance.bodies) == {BODY}


@contextlib.asynccontextmanager
async def envoy_for(
    tmp_path: Path,
    instance: Witness,
    ports: tuple[int, int] = (1, 1),
    *,
    changes: Callable[[dict[str, Any]], None] | None = None,
    keys: Path | None = None,
) -> AsyncIterator[Envoy]:
    document = configuration([f"http://127.0.0.1:{instance.port}"], [ports])
    gateway = write_gateway(tmp_path, instance.port)
    with_keys_file(document, keys or write_keys(tmp_path, gateway))
    ext_proc(document)["message_timeout"] = "0.3s"
    if changes is not None:
        changes(document)
    async with running_envoy(document, tmp_path) as envoy:
        yield envoy


@contextlib.asynccontextmanager
async def running_picker_process(path: Path) -> AsyncIterator[PickerProcess]:
    picker = PickerProcess(path)
    try:
        yield picker
    finally:
        picker.stop(signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_picker_that_is_stopped_or_killed_lets_nobody_in(tmp_path, number, instance):
    async with running_picker_process(write_gateway(tmp_path, instance.port)) as picker:
        ports = await picker.ports()
        async with envoy_for(tmp_path, instance, ports) as envoy:
            await until_picked(envoy)
            answer = await ask(envoy, headers=bearer(RIGHT))
            assert answer.status == 200, answer
            assert "authorization" not in instance.heads.pop().lower()
            instance.bodies.clear()
            picker.process.send_signal(number)
            # At once, while Envoy still holds it for healthy, and after that.
            await assert_guarded(envoy, instance)
            instance.heads.clear()
            await until_picked(envoy, 0)
            await assert_guarded(envoy, instance)


async def test_a_picker_that_never_started_lets_nobody_in(tmp_path, instance):
    async with envoy_for(tmp_path, instance) as envoy:
        await assert_guarded(envoy, instance)


@pytest.mark.parametrize("behaviour", ext_procs.BEHAVIOURS)
async def test_a_picker_that_does_not_decide_lets_nobody_in(tmp_path, behaviour, instance):
    async with (
        ext_procs.undecided_picker(behaviour) as port,
        envoy_for(tmp_path, instance, (port, 1)) as envoy,
    ):
        await until_picked(envoy)
        await assert_guarded(envoy, instance)


async def test_a_connection_that_is_reset_in_the_middle_lets_nobody_in(tmp_path, instance):
    async with (
        ext_procs.undecided_picker(ext_procs.decides_nothing) as port,
        ext_procs.resetting(port) as way,
        envoy_for(tmp_path, instance, (way, 1)) as envoy,
    ):
        await until_picked(envoy)
        await assert_guarded(envoy, instance)


async def test_with_a_picker_the_same_is_refused(tmp_path, instance):
    gateway = write_gateway(tmp_path, instance.port)
    async with running_picker_process(gateway) as picker:
        ports = await picker.ports()
        # What the guard would let in, it is not asked: this file says that all are.
        opened = tmp_path / "open.keys"
        opened.write_text("open\nend\n")
        slow = {"message_timeout": "30s"}
        async with envoy_for(
            tmp_path, instance, ports, keys=opened, changes=lambda d: ext_proc(d).update(slow)
        ) as envoy:
            await until_picked(envoy)
            bound = (bearer(OF_ONE_MODEL), False)
            for headers, opens in KEYS:
                # The picker reads bodies, and so knows which model is asked for.
                opens = opens or (headers, opens) == bound
                answer = await ask(envoy, headers=headers)
                assert answer.status == (200 if opens else 401), (headers, answer)
            await assert_off_the_list_is_refused(envoy, instance)
            assert_no_credentials(instance)
            assert (await ask(envoy, "/readyz", method="GET", body=b"")).status == 200
            listed = await ask(envoy, "/v1/models", bearer(RIGHT), method="GET", body=b"")
            assert b'"id":"m"' in listed.body
            assert (await ask(envoy, "/v1/models", method="GET", body=b"")).status == 401


async def until_status(envoy: Envoy, key: str, status: int) -> None:
    """Wait until Envoy has looked at its file again."""
    async with asyncio.timeout(30):
        while (await ask(envoy, headers=bearer(key))).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.system
async def test_keys_are_read_again_and_without_a_whole_file_nobody_is_served(tmp_path, instance):
    gateway = write_gateway(tmp_path, instance.port)
    path = tmp_path / "envoy.keys"
    async with envoy_for(tmp_path, instance, keys=path) as envoy:
        for text in (None, "", "open\n", "end\nopen\n", "open\nend\nx", "opne\nend\n"):
            if text is not None:
                path.write_text(text)
            for headers in ((), bearer(RIGHT)):
                answer = await ask(envoy, headers=headers)
                assert (answer.status, answer.code) == (503, "picker_unavailable")
        write_keys(tmp_path, gateway)
        await until_status(envoy, RIGHT, 200)
        whole = path.read_text()
        # A key that was taken away, a file that was cut off, and one that is gone.
        path.write_text("".join(x for x in whole.splitlines(True) if hash_of(RIGHT)[7:] not in x))
        await until_status(envoy, RIGHT, 401)
        path.write_text(whole)
        await until_status(envoy, RIGHT, 200)
        path.write_text(whole[: len(whole) // 2])
        await until_status(envoy, RIGHT, 503)
        path.write_text(whole)
        await until_status(envoy, RIGHT, 200)
        path.unlink()
        await until_status(envoy, RIGHT, 503)


async def test_of_a_gateway_without_keys_the_file_says_so_and_all_are_served(
    tmp_path, capsys, instance
):
    gateway = write_gateway(tmp_path, instance.port, server={}, clients={})
    path = write_keys(tmp_path, gateway)
    assert path.read_text().splitlines()[1:] == ["open", "end"]
    assert "everybody is served" in capsys.readouterr().err
    async with envoy_for(tmp_path, instance, keys=path) as envoy:
        for headers, _ in KEYS[:-1]:
            if "x" * 60_000 not in "".join(headers):
                assert (await ask(envoy, headers=headers)).status == 200
        await assert_off_the_list_is_refused(envoy, instance)
        assert_no_credentials(instance)


async def test_the_instances_own_key_is_sent_where_all_have_the_same(tmp_path, capsys, instance):
    url = f"http://127.0.0.1:{instance.port}"
    with_key = {"id": "i0", "base_url": url, "api_key_env": "ENVOY_TEST_INSTANCE"}
    without = {"id": "i1", "base_url": "http://127.0.0.1:1"}
    gateway = write_gateway(tmp_path, instance.port, instances=[with_key, without])
    assert "instance-key" not in write_keys(tmp_path, gateway).read_text()
    assert "answer 401" in capsys.readouterr().err
    gateway = write_gateway(tmp_path, instance.port, instances=[with_key])
    path = write_keys(tmp_path, gateway)
    path = path.rename(tmp_path / "with_instance.keys")
    async with envoy_for(tmp_path, instance, keys=path) as envoy:
        for headers in (bearer(RIGHT), (f"x-api-key: {RIGHT}",)):
            assert (await ask(envoy, headers=headers)).status == 200
    for head in instance.heads:
        assert "\r\nauthorization: Bearer of-the-instance\r\n" in head
        assert head.lower().count("authorization") == 1
        assert RIGHT not in head


async def test_keys_of_every_length_are_hashed_as_the_gateway_hashes_them(
    tmp_path, monkeypatch, instance
):
    keys = {size: (f"k{size}" * 512)[:size] for size in (*range(1, 131), 511, 512, 513)}
    path = tmp_path / "all.keys"

    def digest(size: int, key: str) -> str:
        if size % 2:
            return "sha256 " + hashlib.sha256(key.encode()).hexdigest()
        return "hmac-sha256 " + hmac.digest(b"pepper", key.encode(), "sha256").hex()

    lines = [f"key {digest(size, key)} never any" for size, key in keys.items()]
    path.write_text("\n".join([*lines, "hash-secret ENVOY_TEST_SHORT", "end"]) + "\n")
    monkeypatch.setenv("ENVOY_TEST_SHORT", "pepper")
    async with envoy_for(tmp_path, instance, keys=path) as envoy:
        answers = await asyncio.gather(*(ask(envoy, headers=bearer(k)) for k in keys.values()))
        refused = [size for size, a in zip(keys, answers, strict=True) if a.status != 200]
        assert refused == [513]
    # Without its secret, a key under one opens nothing.
    monkeypatch.delenv("ENVOY_TEST_SHORT")
    async with envoy_for(tmp_path / "again", instance, keys=path) as envoy:
        statuses = [(await ask(envoy, headers=bearer(keys[n]))).status for n in (64, 65)]
        assert statuses == [401, 200]


async def test_requests_per_minute_hold_for_each_key_without_a_picker_too(tmp_path, instance):
    """So that a client that slows the picker down gains no more requests by it."""
    listed = [
        {"name": "right", "hash": hash_of(RIGHT), "requests_per_minute": 3, "group": "team"},
        {"name": "other", "hash": hash_of(OTHER), "requests_per_minute": 9, "group": "team"},
    ]
    gateway = write_gateway(tmp_path, instance.port, server={})
    document = {"groups": {"team": {"requests_per_minute": 5}}, "keys": listed}
    write(tmp_path / "keys.yaml", document)
    path = write_keys(tmp_path, gateway).rename(tmp_path / "limited.keys")
    async with envoy_for(tmp_path, instance, keys=path) as envoy:
        for key, most in ((RIGHT, 3), (OTHER, 5)):
            answers = [await ask(envoy, headers=bearer(key)) for _ in range(8)]
            assert [a.status for a in answers] == [200] * most + [429] * (8 - most)
            assert answers[-1].code == "rate_limit_exceeded"
    assert len(instance.heads) == 8


@pytest.mark.parametrize("whose", ["all", "bound"])
async def test_keys_of_some_models_are_let_in_only_where_the_operator_wants_it(
    tmp_path, whose, instance
):
    gateway = write_gateway(tmp_path, instance.port)
    path = write_keys(tmp_path, gateway, *(["--any-model"] if whose == "all" else []))
    async with envoy_for(tmp_path, instance, keys=path.rename(path.with_suffix(".x"))) as e:
        status = (await ask(e, headers=bearer(OF_ONE_MODEL))).status
        assert status == (200 if whose == "all" else 401)


ON_ANY_PATH = tuple(sorted(guarded_at(CHAT)))
# By the last part of their names. Whose a response is, only the picker knows.
ON_ONE_PATH = {
    path: tuple(name.rpartition(".")[2] for name in sorted(guarded_at(path) - guarded_at(CHAT)))
    for path in WORK_BY_PATH
    if guarded_at(path) - guarded_at(CHAT)
}
ON_ONE_PATH[RESPONSES] += ("previous_response_id",)
# Beginnings of names.
HEADERS = tuple(GUARDED_HEADERS)


async def test_fields_that_only_the_picker_can_judge_reach_no_instance(tmp_path, instance):
    judged = [
        *(b'{"model":"m","%b":1}' % field.encode() for field in ON_ANY_PATH),
        b'{"kv_transfer_params" \n\t : {}}',
        b'{"a":[{"kv_transfer_params":{}}]}',
        b'{"kv\\u005ftransfer_params":{}}',
        b'{"\\u006Bv_transfer_param\\u0073":{}}',
        b'{"x":"kv_transfer_params","kv_transfer_params":{}}',
        b'{"x":"<\\u003c>","pri\\u006Frity":1}',
        b'{"x":"\\\\","\\u0070riority":1}',
        b'{"\\\\\\u0070":1}',
        *(
            '{"kv_transfer_params":{}}'.encode(each)
            for each in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le")
        ),
        b'\xef\xbb\xbf{"kv_transfer_params":{}}',
        b" " * 2_000_000 + b'{"kv_transfer_params":{}}',
    ]
    form = b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n{}\r\n--b--\r\n'
    innocent = [
        b"",
        b"{",
        BODY,
        json.dumps({"prompt": 'why is "kv_transfer_params": {} refused?'}).encode(),
        json.dumps({"prompt": "kv_transfer_params", "x": "priority"}).encode(),
        json.dumps({"prompt": "<\u2028 \x01 \xfc>"}).encode(),
        b'{"prompt":"\\u003cb\\u003e \\u0060 \\\\u0061 \\\\\\\\u0062 \\u00"}',
    ]
    async with envoy_for(tmp_path, instance) as envoy:
        for body in judged:
            answer = await ask(envoy, headers=bearer(RIGHT), body=body)
            assert (answer.status, answer.code) == (503, "picker_unavailable"), body[-100:]
        for path, fields in ON_ONE_PATH.items():
            for field in fields:
                nested = b'{"model":"m","x":{"%b": 1}}' % field.encode()
                assert (await ask(envoy, path + "?x=1", bearer(RIGHT), body=nested)).status == 503
                innocent.append(nested)
        for field in ON_ANY_PATH:
            path = "/v1/audio/transcriptions"
            answer = await ask(envoy, path, bearer(RIGHT), body=form % field.encode())
            assert answer.status == 503
        assert instance.heads == []
        for body in innocent:
            assert (await ask(envoy, headers=bearer(RIGHT), body=body)).status == 200
        audio = form % b"file" + bytes(range(256))
        assert (await ask(envoy, path, bearer(RIGHT), body=audio)).status == 200
        assert instance.bodies == [*innocent, audio]


FORGED = (
    *("x-data-parallel-rank: 3", "X-Data-Parallel-Host-Port: 10.0.0.1:1"),
    "X-PREFILLER-host-port: x",
    *(f"{name.title()}anything: x" for name in HEADERS),
    *("x_data_parallel_rank: 3", "x-data_parallel-rank: 3", "X_Api_Key: x"),
    *("x-envoy-upstream-rq-timeout-ms: 1", "x-envoy-retry-on: 5xx,retriable-4xx"),
    *("X-Envoy-Max-Retries: 99", "x-envoy-upstream-alt-stat-name: x"),
    "x-envoy-original-path: /sleep",
    *("x-envoy-hedge-on-per-try-timeout: true", "x-envoy-retriable-status-codes: 200"),
    *("x-envoy-internal: true", "x-envoy-decorator-operation: x", "x-envoy-force-trace: true"),
    *("x-gateway-destination-endpoint: 127.0.0.1:1", "proxy-authorization: Basic secret"),
    "x-request-id: ___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:1_",
)


@pytest.mark.parametrize("with_picker", [True, False])
async def test_fields_that_steer_envoy_or_an_engine_reach_no_instance(
    tmp_path, with_picker, instance
):
    async with contextlib.AsyncExitStack() as stack:
        ports = (1, 1)
        if with_picker:
            gateway = write_gateway(tmp_path, instance.port)
            picker = await stack.enter_async_context(running_picker_process(gateway))
            ports = await picker.ports()
        envoy = await stack.enter_async_context(envoy_for(tmp_path, instance, ports))
        if with_picker:
            await until_picked(envoy)
        assert (await ask(envoy, headers=(*bearer(RIGHT), *FORGED))).status == 200
        (head,) = instance.heads
        names = {line.split(":")[0].lower() for line in head.split("\r\n")[1:] if line}
        # The first of these is the router's own, and the second the picker's choice.
        own = {"x-envoy-expected-rq-timeout-ms", "x-request-id"}
        assert not {f.split(":")[0].lower() for f in FORGED} & (names - own)
        assert "___prefill_addr" not in head
        assert not any(name.startswith("x-envoy-") for name in names - own)


async def test_upgrades_tunnels_and_old_versions_reach_no_instance(tmp_path, instance):
    upgrades = [
        ("connection: upgrade", f"upgrade: {protocol}")
        for protocol in ("websocket", "h2c", "tcp", "CONNECT-UDP")
    ]
    async with envoy_for(tmp_path, instance) as envoy:
        for fields in upgrades:
            for method, path in (("GET", "/v1/realtime"), ("GET", "/sleep"), ("POST", "/sleep")):
                answer = await ask(envoy, path, (*bearer(RIGHT), *fields), method=method, body=b"")
                assert answer.status in (400, 403, 404), (fields, answer)
            await ask(envoy, headers=fields)
        for target in ("127.0.0.1:80", "x:1", CHAT):
            answer = await ask(envoy, target, bearer(RIGHT), method="CONNECT", body=b"")
            assert answer.status in (0, 400, 403, 404, 405), answer
        for version in ("1.0", "0.9", "2.0"):
            answer = await ask(envoy, version=version)
            assert answer.status in (0, 400, 401, 426, 505), answer
        assert instance.heads == []


async def over_http2(envoy: Envoy, *fields: tuple[str, str]) -> str:
    """The status of a request with ``BODY`` by a client of HTTP/2, or that it was reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(envoy.url.rsplit(":", 1)[1]))

    def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
        head = len(data).to_bytes(3, "big") + bytes([kind, flags])
        return head + stream.to_bytes(4, "big") + data

    length = ("content-length", str(len(BODY)))
    block = Encoder().encode([(":scheme", "http"), (":authority", "x"), *fields, length])
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    writer.write(frame(1, 4, 1, block) + frame(0, 1, 1, BODY))
    try:
        async with asyncio.timeout(30):
            while True:
                head = await reader.readexactly(9)
                data = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == 1:
                    return next(str(v) for k, v in Decoder().decode(data) if k == ":status")
                if head[3] in (3, 7):
                    return "reset"
    except (ConnectionError, asyncio.IncompleteReadError):
        return "reset"
    finally:
        writer.close()


async def test_clients_of_http2_get_no_further(tmp_path, instance):
    post = (":method", "POST")
    async with envoy_for(tmp_path, instance) as envoy:
        key = ("authorization", f"Bearer {RIGHT}")
        assert await over_http2(envoy, post, (":path", CHAT), key) == "200"
        assert len(instance.heads) == 1
        assert await over_http2(envoy, post, (":path", CHAT)) == "401"
        for fields in (
            [post, (":path", "/sleep"), key],
            [post, (":path", "//sleep"), key],
            [post, (":path", "/v1/chat/completions/../../../sleep"), key],
            [post, (":path", CHAT), (":path", "/sleep"), key],
            [(":method", "GET"), (":path", "/metrics"), key],
            [(":method", "CONNECT"), (":protocol", "websocket"), (":path", "/v1/realtime"), key],
        ):
            assert await over_http2(envoy, *fields) in ("400", "403", "404", "reset")
        assert len(instance.heads) == 1
        assert_no_credentials(instance)


# One that says nothing is waited for in this mode.
@pytest.mark.parametrize("behaviour", ext_procs.BEHAVIOURS[1:])
async def test_a_streamed_body_lets_nobody_in_either(tmp_path, behaviour, instance):
    async with (
        ext_procs.undecided_picker(behaviour) as port,
        envoy_for(tmp_path, instance, (port, 1), changes=full_duplex) as envoy,
    ):
        await until_picked(envoy)
        refused = [headers for headers, opens in KEYS if not opens]
        answers = await asyncio.gather(*(ask(envoy, headers=headers) for headers in refused))
        assert not any(answer.status == 200 for answer in answers)
        await assert_off_the_list_is_refused(envoy, instance)
        assert instance.heads == []


async def test_where_the_operator_wants_it_nothing_is_served_without_a_picker(tmp_path, instance):
    def closed(document: dict[str, Any]) -> None:
        ext_proc(document)["failure_mode_allow"] = False

    async with envoy_for(tmp_path, instance, changes=closed) as envoy:
        for headers in ((), bearer(RIGHT)):
            assert (await ask(envoy, headers=headers)).status >= 500
        assert instance.heads == []


async def test_a_body_that_is_too_long_reaches_no_instance(tmp_path, instance):
    def small(document: dict[str, Any]) -> None:
        listener = document["static_resources"]["listeners"][0]
        listener["per_connection_buffer_limit_bytes"] = 100_000

    async with envoy_for(tmp_path, instance, changes=small) as envoy:
        for headers in ((), bearer(RIGHT)):
            answer = await ask(envoy, headers=headers, body=b" " * 300_000)
            # 0: it was closed while the body was still being written.
            assert answer.status in (401, 413, 0), answer
        assert instance.heads == []


def test_paths_and_fields_are_the_gateways_own():
    document = configuration([], [])
    (host,) = manager(document)["route_config"]["virtual_hosts"]
    *listed, rest, connect = host["routes"]
    to_instances = [r["match"] for r in listed if r["route"]["cluster"] == "instances"]
    only_post = [{"name": ":method", "string_match": {"exact": "POST"}}]
    assert to_instances == [{"path": path, "headers": only_post} for path in WORK_BY_PATH]
    to_picker = [r["match"] for r in listed if r["route"]["cluster"] == "picker_http"]
    only_get = [{"name": ":method", "string_match": {"exact": "GET"}}]
    assert to_picker == [
        {"path_separated_prefix": "/v1/models", "headers": only_get},
        {"path": "/readyz", "headers": only_get},
    ]
    assert [rest["match"], connect["match"]] == [{"prefix": "/"}, {"connect_matcher": {}}]
    assert rest["direct_response"]["status"] == connect["direct_response"]["status"] == 404
    # Nothing that may reach an instance is exempt from the picker or from the guard.
    assert not any(
        "typed_per_filter_config" in r for r in listed if r["route"]["cluster"] == "instances"
    )
    script = http_filter(document, GUARD)["default_source_code"]["inline_string"]
    found = re.search(r"JUDGED_FIELDS = ({.*?\n}\n)", script, re.DOTALL)
    assert found is not None
    by_path = dict(re.findall(r'\["(.*?)"\] = {([^}]*)}', found[1]))
    judged = {path: set(re.findall(r'"(\w+)"', words)) for path, words in by_path.items()}
    assert judged == {
        path: set(fields) for path, fields in ({"": ON_ANY_PATH} | ON_ONE_PATH).items()
    }
    mutations = http_filter(document, HEADER_MUTATION)["mutations"]
    removed = [each.get("remove_on_match") for each in mutations["request_mutations"]]
    beginnings = {each["key_matcher"]["prefix"] for each in removed if each}
    assert beginnings == {"x-envoy-", *HEADERS}
    assert f"MOST_KEY_BYTES = {MOST_KEY_BYTES}\n" in script
