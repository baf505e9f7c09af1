"""What a client may not say to an engine, over every transport of a body and of a head."""

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from hetero_gateway.engines.vllm import GUARDED_FIELDS, GUARDED_HEADERS, WORK_BY_PATH, guarded_at
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.request.body_fields import LEAST_BYTES, BodyReaders
from hetero_gateway.gateway.request.openai import parse_body
from tests.fakes.gateway_files import clients
from tests.fakes.running import CHAT, config_for, rig

GENERATE = "/inference/v1/generate"
SPEECH = "/v1/audio/transcriptions"
FORMS = (SPEECH, "/v1/audio/translations")
HELLO = [{"role": "user", "content": "hello"}]
SAID = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": []},
    "ec_transfer_params": {"host": "10.0.0.1"},
    "vllm_xargs": {"kv_transfer_params": "x"},
    "data_parallel_rank": 1,
    "priority": -5,
    "prompt_embeds": "gASV",
    "features": {"mm_hashes": {"image": ["a"]}},
    "request_id": "resp_of_another",
    "sampling_params.extra_args": {"kv_transfer_params": {"remote_port": 1}},
}
GUARDED = [
    (path, name) for path in WORK_BY_PATH if path not in FORMS for name in sorted(guarded_at(path))
]


def body_with(name: str, value: Any, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "messages": HELLO, "token_ids": [1, 2]} | more
    outer, _, inner = name.partition(".")
    body[outer] = {"max_tokens": 4, inner: value} if inner else value
    return body


def escaped(name: str) -> str:
    """A key with every letter escaped."""
    return "".join(f"\\u{ord(letter):04x}" for letter in name)


def spellings(name: str, value: Any) -> dict[str, bytes]:
    """Bodies that say the same to an engine."""
    body = body_with(name, value)
    plain = json.dumps(body)
    last = name.rpartition(".")[2]
    long = json.dumps(body | {"text": "x" * LEAST_BYTES})
    wide = json.dumps(body_with(name, {"pad": "y" * 2 * LEAST_BYTES, "v": value}))
    bloated = json.dumps({"a": [[]] * LEAST_BYTES} | body)
    return {
        "plain": plain.encode(),
        "escaped": plain.replace(f'"{last}"', f'"{escaped(last)}"').encode(),
        "one letter": plain.replace(f'"{last}"', f'"{escaped(last[0])}{last[1:]}"').encode(),
        "after a null of its own": f'{{"{name}": null, {plain[1:]}'.encode(),
        "spread out": json.dumps(body, indent=8).replace(":", " \t\r\n :").encode(),
        "long": long.encode(),
        "long and escaped": long.replace(f'"{last}"', f'"{escaped(last)}"').encode(),
        "long itself": wide.encode(),
        "behind much": bloated.encode(),
        "with a NaN": ('{"x": NaN, ' + plain[1:]).encode(),
        "with a NaN within": json.dumps(body_with(name, value, y={"z": float("nan")})).encode(),
        "long, with a NaN": ('{"x": NaN, ' + long[1:]).encode(),
        "with a lone surrogate": ('{"x": "\\ud800", ' + plain[1:]).encode(),
        "with 1e999": ('{"x": 1e999, ' + plain[1:]).encode(),
        "a number of another type": ('{"n": [], "stream": {}, ' + plain[1:]).encode(),
        "UTF-16": plain.encode("utf-16"),
        "UTF-32": plain.encode("utf-32-le"),
        "long, UTF-16": long.encode("utf-16-be"),
        "a byte order mark": b"\xef\xbb\xbf" + plain.encode(),
    }


# Those of which the refusal says what is not allowed.
TOLD = ("plain", "escaped", "long", "with a NaN", "UTF-16", "after a null of its own")


@pytest.mark.parametrize(("path", "name"), GUARDED)
def test_a_field_that_is_not_for_clients_is_refused_however_it_is_spelled(
    path: str, name: str
) -> None:
    for spelling, body in spellings(name, SAID[name]).items():
        with pytest.raises(Refusal) as caught:
            parse_body(body, b"application/json", path)
        assert caught.value.status == 400, spelling
        if caught.value.code == "field_not_allowed":
            assert caught.value.param == name, spelling
            assert "server.allow_engine_fields" in caught.value.message
        else:  # what it was hidden in cannot be read at all
            assert caught.value.code == "invalid_json", (spelling, caught.value.message)
        if spelling in TOLD:
            assert caught.value.code == "field_not_allowed", (spelling, caught.value.message)
        # The same without the field is no error of this kind.
        outer = name.partition(".")[0]
        fine = {key: each for key, each in body_with(name, None).items() if key != outer}
        parse_body(json.dumps(fine).encode(), b"application/json", path)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", GENERATE, "/rerank"])
def test_what_says_nothing_is_no_offence(path: str) -> None:
    """Clients that write all their fields write these: null, and priority 0."""
    nothing: dict[str, Any] = {name: None for name in guarded_at(path) if "." not in name} | {
        "sampling_params": {"extra_args": None, "max_tokens": 4}
    }
    for priority in (0, None, 0.0, "0", False):
        for pad in ("", "x" * LEAST_BYTES):
            body = {"model": "m", "messages": HELLO} | nothing | {"priority": priority, "pad": pad}
            assert parse_body(json.dumps(body).encode(), b"", path).model == "m"
    # Of equal keys an engine reads the last one.
    parse_body(b'{"model": "m", "priority": 5, "priority": 0}', b"", path)


@pytest.mark.parametrize(("path", "name"), GUARDED)
def test_what_an_operator_allows_is_read_as_before(path: str, name: str) -> None:
    body = json.dumps(body_with(name, SAID[name])).encode()
    assert parse_body(body, b"", path, None, BodyReaders((name,))).model == "m"
    with pytest.raises(Refusal):
        parse_body(body, b"", path, None, BodyReaders(GUARDED_FIELDS.keys() - {name}))


def test_a_parameter_within_sampling_params_cannot_hide_in_what_is_left_out() -> None:
    """A long object is looked into, and one that only Python's json reads is refused."""
    inner = '"extra_args": {"kv_transfer_params": {}}'
    for pad in ('"x": "%s"' % ("y" * 5000), '"x": NaN, "y": "%s"' % ("y" * 5000), '"x": []'):
        for rest in ("", ', "text": "%s"' % ("z" * LEAST_BYTES)):
            body = '{"model": "m", "token_ids": [1], "sampling_params": {%s, %s}%s}'
            for order in ((pad, inner), (inner, pad)):
                with pytest.raises(Refusal):
                    parse_body((body % (*order, rest)).encode(), b"", GENERATE)


# Forms


def form(*parts: tuple[bytes, bytes], boundary: bytes = b"b") -> bytes:
    """``parts``: the head's lines behind "Content-Disposition: form-data; ", and the value."""
    return (
        b"".join(
            b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary, head, value)
            for head, value in parts
        )
        + b"--%b--\r\n" % boundary
    )


MODEL = (b'name="model"', b"m")
FILE = (b'name="file"; filename="a.wav"\r\nContent-Type: audio/wav', b"RIFF....\r\n--c--\r\n")
XARGS = b'{"kv_transfer_params": {}}'
KIND = b"multipart/form-data; boundary=b"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form(MODEL, (b'name="vllm_xargs"', XARGS), FILE), KIND),
        (form(MODEL, FILE, (b'name="vllm_xargs"', XARGS)), KIND),
        (form(MODEL, (b'name="a"', b"x" * 3_000_000), (b'name="vllm_xargs"', XARGS)), KIND),
        (form((b'name="vllm_xargs[a]"', XARGS), MODEL), KIND),
        (form((b'name="vllm_xargs.a"', XARGS), MODEL), KIND),
        (form((b'name="vllm_xargs"; filename="x"', XARGS), MODEL), KIND),
        (form((b'name="vllm_xargs"', b"null"), (b'name="vllm_xargs"', XARGS)), KIND),
        (form((b'name="priority"', b"-1")), KIND),
        # Spelled in a way of which nobody can say how it is read.
        (form((b"name=vllm_xargs", XARGS)), KIND),
        (form((b'name="vllm\\_xargs"', XARGS)), KIND),
        (form((b'name="vllm%5fxargs"', XARGS)), KIND),
        (form((b"name*=utf-8''vllm_xargs", XARGS)), KIND),
        (form((b'name="a"; name="vllm_xargs"', XARGS)), KIND),
        (form((b'name="a"; filename="\\"; name=\\"vllm_xargs"', XARGS)), KIND),
        (form((b'name="a"\r\nContent-Disposition: form-data; name="vllm_xargs"', XARGS)), KIND),
        (form((b'name="a"\r\n ; name="vllm_xargs"', XARGS)), KIND),
        (form((b'name="+AHYAbABsAG0AXwB4AGEAcgBnAHM-"', XARGS)), KIND + b"; charset=utf-7"),
        (form((b'name="vllm_xargs"', XARGS)).replace(b"\r\n", b"\n"), KIND),
        # Another boundary than the one that is read.
        (form((b'name="vllm_xargs"', XARGS), boundary=b"c"), KIND),
        (form((b'name="vllm_xargs"', XARGS), boundary=b"c"), KIND + b"; boundary=c"),
        (form((b'name="vllm_xargs"', XARGS), boundary=b"c"), b"multipart/form-data; boundary*=c"),
        (b"preamble\r\n" + form((b'name="vllm_xargs"', XARGS)), KIND),
        (form(MODEL)[:-6] + b"-x\r\n" + form((b'name="vllm_xargs"', XARGS)), KIND),
        (form((b'name="a"', b"")).replace(b"\r\n\r\n\r\n", b"\r\n\r\n"), KIND),
        (form(MODEL)[:-6], KIND),
        (b"vllm_xargs=%7B%7D&model=m", b"application/x-www-form-urlencoded"),
        (b'{"vllm_xargs": {"a": 1}}', b"application/json"),
    ],
)
def test_no_form_says_it_either(body: bytes, kind: bytes) -> None:
    for path in FORMS:
        with pytest.raises(Refusal) as caught:
            parse_body(body, kind, path)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    "kind",
    [
        KIND,
        b'Multipart/Form-Data; Boundary="b"',
        KIND + b"; charset=UTF-8",
        b"multipart/form-data;boundary=b",
    ],
)
def test_forms_as_clients_write_them_are_read(kind: bytes) -> None:
    fields = (MODEL, (b'name="stream"', b"true"), (b'name="timestamp_granularities[]"', b"word"))
    for name in (b'filename="a.wav"', "filename=\"ä ö.wav\"; filename*=UTF-8''%C3%A4".encode()):
        file = (b'name="file"; ' + name, FILE[1])
        parsed = parse_body(form(*fields, file), kind, SPEECH)
        assert (parsed.model, parsed.stream) == ("m", True)
    # Of equal names the last one counts, as for the engine.
    assert parse_body(form(MODEL, (b'name="model"', b"other")), KIND, SPEECH).model == "other"
    allowed = BodyReaders(("vllm_xargs",))
    xargs = form(MODEL, (b'name="vllm_xargs"', XARGS))
    assert parse_body(xargs, KIND, SPEECH, None, allowed).model == "m"


def test_what_httpx_writes_is_read() -> None:
    request = httpx.Request(
        "POST",
        "http://x",
        data={"model": "m", "language": "de"},
        files={"file": ("ä.wav", b"RIFF" * 9, "audio/wav")},
    )
    parsed = parse_body(request.read(), request.headers["content-type"].encode(), SPEECH)
    assert parsed.model == "m"


# Over the wire


@pytest.mark.parametrize("workers", [1, 2])
async def test_nothing_of_it_reaches_an_instance_and_the_rest_goes_as_it_came(workers: int) -> None:
    async with rig(workers=workers) as (_, client, fakes):
        for path, name in ((CHAT, "kv_transfer_params"), (GENERATE, "sampling_params.extra_args")):
            refused = await client.post(path, json=body_with(name, SAID[name]))
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["code"], error["param"]) == ("field_not_allowed", name)
            assert error["type"] == "invalid_request_error"
        anthropic = await client.post("/v1/messages", json=body_with("vllm_xargs", {"a": 1}))
        assert anthropic.status_code == 400
        assert "vllm_xargs" in anthropic.json()["error"]["message"]
        # A body is JSON on these paths, whatever it is called; twice it is called nothing.
        said, kind = json.dumps(body_with("kv_transfer_params", {})).encode(), KIND.decode()
        other = "multipart/form-data; boundary=c"
        for path, content, kinds, code in (
            (CHAT, said, [kind], "field_not_allowed"),
            (CHAT, said, [], "field_not_allowed"),
            (CHAT, said, ["application/json", kind], "bad_request"),
            (SPEECH, form(MODEL), [other, kind], "bad_request"),
        ):
            headers = [("content-type", each) for each in kinds]
            answer = await client.post(path, content=content, headers=headers)
            assert answer.json()["error"]["code"] == code
        assert fakes[0].bodies == []
        fine = b'{ "model":"m" ,"messages":[],"priority" :0,"cache_salt":"x", "vllm_xargs":null}'
        assert (await client.post(CHAT, content=fine)).status_code == 200
        assert fakes[0].bodies == [fine]


async def test_an_operator_may_allow_fields_and_headers_also_while_serving() -> None:
    server = {"allow_engine_fields": ["vllm_xargs"], "allow_engine_headers": ["X-Kv-Session"]}
    async with rig(server=server) as (running, client, fakes):
        body = json.dumps(body_with("vllm_xargs", {"a": 1})).encode()
        headers = {"x-kv-session": "1", "x-kv-host": "2"}
        assert (await client.post(CHAT, content=body, headers=headers)).status_code == 200
        assert fakes[0].bodies == [body]
        head = fakes[0].heads[-1].lower()
        assert b"x-kv-session: 1" in head
        assert b"x-kv-host" not in head
        settings = running.gateway.settings
        settings.apply(settings.prepare(config_for(fakes)))
        assert (await client.post(CHAT, content=body)).status_code == 400
    with pytest.raises(ValidationError, match="kv_transfer_params"):
        config_for([], server={"allow_engine_fields": ["kv_transfer"]})
    with pytest.raises(ValidationError, match="x-data-parallel-"):
        config_for([], server={"allow_engine_headers": ["accept"]})


async def test_headers_for_an_engines_machinery_end_here() -> None:
    sent = {
        "X-data-parallel-rank": "1",
        "X-Data-Parallel-Host-Port": "10.0.0.1:1",
        "X_Data_Parallel_Rank": "1",
        "x-prefiller-host-port": "10.0.0.1:1",
        "x-prefiller-url": "http://10.0.0.1",
        "x-decoder-host-port": "10.0.0.1:1",
        "x-encoder-hosts-ports": "10.0.0.1:1",
        "X-Vllm-Priority": "-5",
        "x-gateway-destination-endpoint": "10.0.0.1:1",
        "x-gateway-model-name-rewrite": "other",
        "X-Amzn-SageMaker-Adapter-Identifier": "other",
        "X-Amzn-SageMaker-Session-Id": "other",
    }
    passed = {"x-session-id": "s", "x-stainless-lang": "python", "x-custom": "1", "user-agent": "u"}
    async with rig() as (running, client, fakes):
        body = {"model": "m", "messages": HELLO}
        for _ in range(2):  # a name is looked at once
            assert (await client.post(CHAT, json=body, headers=sent | passed)).status_code == 200
        names = {
            line.partition(b":")[0].lower().decode()
            for head in fakes[0].heads
            for line in head.split(b"\r\n")[1:]
        }
        assert names.isdisjoint(name.lower() for name in sent)
        assert names >= passed.keys()
        # Of thousands of names few are remembered.
        for some in range(40):
            many = {f"x-data-parallel-{some}-{i}": "1" for i in range(60)}
            many |= {f"x-own-{some}-{i}": "1" for i in range(40)}
            assert (await client.post(CHAT, json=body, headers=many)).status_code == 200
            assert fakes[0].heads[-1].count(b"x-own-") == 40
            assert b"x-data-parallel-" not in fakes[0].heads[-1]
        assert len(running.gateway.dataplane.rooms.fields.withheld) <= 1024


async def test_a_request_id_that_names_hosts_is_replaced() -> None:
    async with rig() as (_, client, fakes):
        for request_id, kept in (
            ("___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2", False),
            ("x_decode_addr_h:1", False),
            ("my-id", True),
        ):
            body, headers = {"model": "m", "messages": HELLO}, {"x-request-id": request_id}
            answer = await client.post(CHAT, json=body, headers=headers)
            assert (answer.headers["x-request-id"] == request_id) is kept
            assert (request_id.encode() in fakes[0].heads[-1]) is kept


def test_every_header_has_its_reason_and_every_field_its_name() -> None:
    assert all(reason for reason in (*GUARDED_FIELDS.values(), *GUARDED_HEADERS.values()))
    assert set(SAID) == set(GUARDED_FIELDS)
    # The picker looks no further than that.
    assert all(name.startswith("x-") for name in GUARDED_HEADERS)
    for path, other in itertools.product(WORK_BY_PATH, GUARDED_FIELDS):
        assert other not in guarded_at(path) or other in GUARDED_FIELDS


# The class's priority


def prioritised(folder: Path, **priorities: int) -> dict[str, Any]:
    """Sections: two clients, one of which is a batch's by itself, and priorities of classes."""
    keys = clients(folder, web={"classes": ["batch"]}, jobs={"class": "batch"})
    return {"clients": keys, "scheduler": {"engine_priorities": priorities}}


@pytest.mark.parametrize("workers", [1, 2])
async def test_engines_hear_the_priority_of_the_class_and_no_other(
    workers: int, tmp_path: Path
) -> None:
    sections = prioritised(tmp_path, batch=10, interactive=0)
    async with rig(workers=workers, **sections) as (_, client, fakes):

        async def ask(name: str, content: bytes, path: str = CHAT, **headers: str) -> int:
            headers |= {"authorization": f"Bearer k{name}"}
            answer = await client.post(path, content=content, headers=headers)
            return answer.status_code

        plain = b'{"model": "m", "messages": [], "priority": 0 }\n'
        assert await ask("web", plain) == 200
        assert fakes[0].bodies[-1] == plain
        assert b"priority" not in fakes[0].heads[-1].lower()
        for name, headers in (("jobs", {}), ("web", {"x-hetero-gateway-class": "batch"})):
            assert await ask(name, plain, **headers, **{"x-vllm-priority": "-9"}) == 200
            # Of equal names the last one counts.
            assert json.loads(fakes[0].bodies[-1])["priority"] == 10
            assert fakes[0].heads[-1].lower().count(b"x-vllm-priority: 10\r\n") == 1
            assert b"-9" not in fakes[0].heads[-1]
        assert await ask("jobs", b'{"model":"m"}', "/v1/messages") == 200
        assert fakes[0].bodies[-1] == b'{"model":"m","priority":10}'
        # What needs no step of an engine has none.
        assert await ask("jobs", b'{"model":"m","prompt":""}', "/tokenize") == 200
        assert fakes[0].bodies[-1] == b'{"model":"m","prompt":""}'
        # Nobody gets out of a class by a body that no field can be added to.
        count = len(fakes[0].bodies)
        assert await ask("jobs", plain.decode().encode("utf-16")) == 400
        assert len(fakes[0].bodies) == count
        # A recording has no priority.
        kind = {"content-type": KIND.decode()}
        assert await ask("jobs", form(MODEL, FILE), SPEECH, **kind) == 400
        assert fakes[0].bodies[-1] == form(MODEL, FILE)


async def test_a_request_that_is_tried_again_has_its_priority_once(tmp_path: Path) -> None:
    async with rig(2, **prioritised(tmp_path, batch=10)) as (_, client, fakes):
        fakes[0].fault = fakes[1].fault = {"die": "before_head"}
        headers = {"authorization": "Bearer kjobs"}
        await client.post(CHAT, json={"model": "m", "messages": []}, headers=headers)
        bodies = [body for fake in fakes for body in fake.bodies]
        assert len(bodies) > 1
        assert all(body.count(b"priority") == 1 for body in bodies)


def test_a_priority_is_its_classs_or_its_clients() -> None:
    for server in (
        {"allow_engine_fields": ["priority"]},
        {"allow_engine_headers": ["x-vllm-priority"]},
    ):
        with pytest.raises(ValidationError, match="engine_priorities"):
            config_for([], server=server, scheduler={"engine_priorities": {"batch": 1}})
