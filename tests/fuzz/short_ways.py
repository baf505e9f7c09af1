"""Each short way on the wire against its long way, and against readers that others wrote.

A short way reads what nearly every message looks like, and leaves the rest to the long way: a chunk
that is wholly here, a field that was seen before, a body in one piece. Where the two differ, one
request is two, or a body says one thing here and another at the engine. So each input is read twice
by the gateway's own code, whole and in pieces (at every byte, or a few), or once by each way. And
what is accepted has to mean the same to h11, to llhttp (httptools), to Python's ``json`` or to
pydantic, wherever they accept it, too. What is refused, or never complete, is nobody's message.
"""

import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from pydantic import TypeAdapter, ValidationError

from hetero_gateway.engines.vllm import Work
from hetero_gateway.engines.vllm.paths import Prompts, prompts_at
from hetero_gateway.errors import Refusal
from hetero_gateway.files.client_keys import KeysFile
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.admission.tenants import Tenants
from hetero_gateway.gateway.request import whole_numbers
from hetero_gateway.gateway.request.openai import (
    ParsedRequest,
    parse_body,
    parse_in_steps,
    with_model,
)
from hetero_gateway.gateway.turns import finish
from hetero_gateway.http.heads import Inbound, RequestHead, read_head
from tests.fuzz.fuzzing import CORPUS, Findings, bodies_of
from tests.fuzz.mutation import mutated_bytes, mutated_head
from tests.fuzz.readers import (
    answer_by_h11,
    answer_by_us,
    chunks_by_us,
    requests_by_h11,
    requests_by_llhttp,
    requests_by_us,
)

# Longer ones are sent over sockets (``bodies``, ``heads``); here the number counts.
_MOST_BYTES = 4096
_ACCEPTED, _REFUSED = 200, 400


class ShortWay(NamedTuple):
    """``draw``: an input. ``differs``: (was it accepted, how the ways differ or "")."""

    draw: Callable[[], Any]
    differs: Callable[[Any], tuple[bool, str]]


def cuts_of(rng: random.Random, data: bytes) -> list[int]:
    """Where to cut: at every byte, at line ends, or at a few places."""
    kind = rng.random()
    if kind < 0.3 and len(data) < 400:
        return list(range(1, len(data)))
    if kind < 0.6:
        ends = [at + 2 for at in range(len(data) - 2) if data[at : at + 2] == b"\r\n"]
        return [at for at in ends if rng.random() < 0.6]
    return sorted(rng.randrange(1, max(2, len(data))) for _ in range(rng.randint(1, 4)))


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """The parts between the cuts."""
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in pairwise(edges) if b > a]


def _joined(rng: random.Random, corpus: list[bytes], mutate: Callable[[bytes], bytes]) -> bytes:
    while True:
        data = mutate(rng.choice(corpus))
        if data and len(data) <= _MOST_BYTES:
            return data


# Chunks of a request's body


_SIZES = (
    b"0x1", b"0X8b", b"0b1", b"0o7", b"+1", b"-1", b" 1", b"1 ", b"1_0", b"01", b"0001", b"", b"g",
    b"1;", b"1;a=b", b"1 ;a", b"1;" + b"x" * 200, b"A", b"a", b"fffffff", b"ffffffffffffffff",
    b"00",
    b"\xb2", b"\xd9\xa1", b"1\t", b"1\r", b"1\n", b"\x0b1", b"1e1", b"e", b"10",
)  # fmt: skip
# Of the right size: what ``int`` or a lenient parser would take for it.
_SPELLINGS = (
    b"0x%x", b"0X%x", b"+%x", b" %x", b"%x ", b"0%x", b"0_%x", b"\t%x", b"%x;", b"%x ;a", b"-%x",
)  # fmt: skip


def chunked(rng: random.Random) -> bytes:
    """A chunked body, some of whose sizes, ends and trailers are not as they must be."""
    parts = []
    for _ in range(rng.randint(0, 5)):
        data = bytes(rng.choice(b"a\r\n0;:") for _ in range(rng.choice((1, 2, 3, 10, 17, 139))))
        size = b"%x" % len(data)
        if rng.random() < 0.12:
            size = rng.choice(_SPELLINGS) % len(data) if rng.random() < 0.5 else rng.choice(_SIZES)
        if rng.random() < 0.2:
            size += b";" + b"e" * rng.choice((0, 1, 30))
        end = (
            rng.choice((b"\n", b"\r", b"", b"\n\r", b"\r\r\n")) if rng.random() < 0.05 else b"\r\n"
        )
        parts.append(size + b"\r\n" + data + end)
    parts.append(rng.choice((b"0", b"0", b"0", b"00", b"0;x", b"0x0", b"")) + b"\r\n")
    if rng.random() < 0.3:
        parts.append(rng.choice((b"a: b\r\n", b"a : b\r\n", b" a: b\r\n", b"a: b\n", b"x\r\n")))
    data = b"".join(parts) + b"\r\n" + rng.choice((b"", b"GET / HTTP/1.1\r\n\r\n"))
    return mutated_bytes(rng, data) if rng.random() < 0.5 else data


_CHUNKED_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunks(rng: random.Random) -> ShortWay:
    def draw() -> tuple[bytes, list[int]]:
        data = chunked(rng)
        return data, cuts_of(rng, data)

    def differs(drawn: tuple[bytes, list[int]]) -> tuple[bool, str]:
        data, cuts = drawn
        whole = chunks_by_us([data])
        pieces = pieces_of(data, cuts)
        if (other := chunks_by_us(pieces)) != whole:
            return True, f"whole {whole}, in {len(pieces)} pieces {other}"
        if whole is None:
            return False, ""
        body, rest = whole
        for name, reader in (("h11", requests_by_h11), ("llhttp", requests_by_llhttp)):
            known, ended = reader(_CHUNKED_HEAD + data[: len(data) - len(rest)])
            if known and known[0].body != body:
                return True, f"here {body!r}, by {name} {known[0].body!r}"
            if not known and not ended:
                return True, f"here complete, by {name} not"
        return True, ""

    return ShortWay(draw, differs)


# Requests, as a connection reads them


def _requests(rng: random.Random) -> ShortWay:
    corpus = [file.read_bytes() for file in sorted((CORPUS / "heads").iterdir())]

    def mutate(data: bytes) -> bytes:
        kind = rng.random()
        if kind < 0.15:
            head, blank, _ = data.partition(b"\r\n\r\n")
            lines = [x for x in head.split(b"\r\n") if not x.lower().startswith(b"content-length")]
            data = b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]) + blank + chunked(rng)
        if kind < 0.5:
            data = mutated_head(rng, data)
        if rng.random() < 0.1:
            data = rng.choice((b"\r\n", b"\r\n\r\n", b"\r", b"\n")) + data
        if rng.random() < 0.2:
            data += rng.choice(corpus)
        return mutated_bytes(rng, data) if rng.random() < 0.3 else data

    def draw() -> tuple[bytes, list[int]]:
        data = _joined(rng, corpus, mutate)
        return data, cuts_of(rng, data)

    def differs(drawn: tuple[bytes, list[int]]) -> tuple[bool, str]:
        data, cuts = drawn
        whole = requests_by_us([data])
        pieces = requests_by_us(pieces_of(data, cuts))
        if pieces != whole:
            return True, f"whole {whole}, in pieces at {cuts} {pieces}"
        if not whole:
            return False, ""
        for name, reader in (("h11", requests_by_h11), ("llhttp", requests_by_llhttp)):
            theirs, ended = reader(data)
            for ours, other in zip(whole, theirs, strict=False):
                if ours.absolute:
                    break  # our target is without it, and our Host is its own
                if ours[:4] != other[:4]:
                    return True, f"here {ours}, by {name} {other}"
            if len(whole) > len(theirs) and not ended:
                return True, f"here {len(whole)} requests, by {name} {len(theirs)} and a part"
        return True, ""

    return ShortWay(draw, differs)


# A head whose lines are known and each of another name, and the same where neither is so


def _known_heads(rng: random.Random) -> ShortWay:
    corpus = [
        file.read_bytes().partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        for file in sorted((CORPUS / "heads").iterdir())
    ]
    # Too long to be remembered, and a name that is there twice.
    padding = b"x-padding: " + b"p" * 4096 + b"\r\nx-padding: q\r\n\r\n"

    def draw() -> bytes:
        data = _joined(rng, corpus, lambda data: mutated_head(rng, data))
        return data[: data.find(b"\r\n\r\n") + 4] or b"\r\n\r\n"

    def differs(data: bytes) -> tuple[bool, str]:
        short, again = _head(data), _head(data)
        long = _head(data[:-2] + padding)
        if short != long or short != again:
            return True, f"known {short}, unknown {long}"
        return short is not None, ""

    return ShortWay(draw, differs)


def _head(data: bytes) -> tuple[Any, ...] | None:
    try:
        head = read_head(data)
    except Refusal:
        return None
    fields: list[Any] = [getattr(head, name) for name in RequestHead.__slots__]
    fields[RequestHead.__slots__.index("by_name")] = None
    headers = [pair for pair in head.headers if pair[0] != b"x-padding"]
    fields[RequestHead.__slots__.index("headers")] = headers
    fields[RequestHead.__slots__.index("options")] = sorted(head.options)
    return tuple(fields)


# Answers, as a connection to an instance reads them


ANSWERS = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-type: text/plain\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n12\r\ndata: 123456789012\r\n"
    b"3;x=y\r\nabc\r\n0\r\nx-trailer: 1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n100\r\n" + b"d" * 256 + b"\r\n"
    b"10\r\ndata: 1234567890\r\n10\r\ndata: 1234567890\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 40 + b"0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
    b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil the end",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nConnection: close, x-a\r\nx-a: 1\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 503 Busy\r\nretry-after: 3\r\ncontent-length: 4\r\n\r\nbusy",
)  # fmt: skip


def _answers(rng: random.Random) -> ShortWay:
    def mutate(data: bytes) -> bytes:
        kind = rng.random()
        if kind < 0.3:
            head = rng.choice(ANSWERS[1:3]).partition(b"\r\n\r\n")[0]
            data = head + b"\r\n\r\n" + chunked(rng)
        if kind < 0.6:
            data = mutated_head(rng, data)
        if rng.random() < 0.15:
            data += rng.choice(ANSWERS)
        return mutated_bytes(rng, data) if rng.random() < 0.5 else data

    def draw() -> tuple[bytes, list[int]]:
        data = _joined(rng, list(ANSWERS), mutate)
        return data, cuts_of(rng, data)

    def differs(drawn: tuple[bytes, list[int]]) -> tuple[bool, str]:
        data, cuts = drawn
        whole = answer_by_us([data], decode=True)
        for decode in (True, False):
            pieces = answer_by_us(pieces_of(data, cuts), decode=decode)
            if pieces != whole:
                how = "decoded" if decode else "as it came"
                return True, f"whole {whole}, in pieces at {cuts} ({how}) {pieces}"
        if whole is None:
            return False, ""
        theirs = answer_by_h11(data)
        if theirs is not None and theirs != whole[:2]:
            return True, f"here {whole}, by h11 {theirs}"
        return True, ""

    return ShortWay(draw, differs)


# Bodies, read at once and in steps


_TENANTS = Tenants(b"secret")
_ODD = (b"NaN", b"Infinity", b"-Infinity", b'"\\ud800"', b'"\xed\xa0\x80"')


def _bodies(rng: random.Random) -> ShortWay:
    drawn = bodies_of(rng.randrange(1 << 30))

    def draw() -> tuple[str, bytes]:
        while True:
            path, body = drawn()
            if rng.random() < 0.05:
                # What only Python's json reads, beside a prompt that is long enough to be cut.
                size, odd = rng.choice((1, 600, 2000)), rng.choice(_ODD)
                field = b'"prompt":"%b","odd":%b,"model"' % (b"p" * size, odd)
                body = body.replace(b'"model"', field, 1)
            if len(body) <= _MOST_BYTES or rng.random() < 0.002:
                return path, body

    def differs(drawn: tuple[str, bytes]) -> tuple[bool, str]:
        path, body = drawn
        short = _parsed(lambda: parse_body(body, b"", path, 7))
        long = _parsed(lambda: finish(parse_in_steps(body, b"", path, 7)))
        if isinstance(short, str) or isinstance(long, str):
            if isinstance(short, str) != isinstance(long, str):
                return True, f"at once {short}, in steps {long}"
            if short == "invalid_json" and _decoded(body) is not None:
                return False, "an engine reads it"
            return False, ""
        if short != long:
            return True, f"at once {short}, in steps {long}"
        return True, _misread(path, body, short)

    return ShortWay(draw, differs)


def _parsed(read: Callable[[], ParsedRequest]) -> ParsedRequest | str:
    """What is read, or the code of the refusal."""
    try:
        return read()
    except Refusal as refusal:
        return refusal.code


def _decoded(body: bytes) -> dict[str, Any] | None:
    """The fields that an engine reads in a body; None: it cannot."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _misread(path: str, body: bytes, parsed: ParsedRequest) -> str:
    """How an engine, which decodes with ``json``, reads another request in a body."""
    found = _decoded(body)
    if found is None:
        return ""
    model = found.get("model")
    if isinstance(model, str):
        model = model.encode("utf-8", "replace").decode()
    if parsed.model != model:
        return f"the model is {model!r}, here {parsed.model!r}"
    # (What other paths take for prompts, tests/gateway/dataplane/test_counted_work.py looks at.)
    prompt = found.get("prompt") if prompts_at(path) is Prompts.TEXT else None
    if (prompts := _prompts(prompt)) is not None and prompts != (
        parsed.exact_prompt_tokens,
        parsed.prompt_count,
    ):
        return f"tokens and prompts are {prompts}, here {parsed}"
    if isinstance(prompt, str) and parsed.text_bytes < len(prompt.encode("utf-8", "replace")):
        return f"the prompt has {len(prompt)} characters, here {parsed.text_bytes} bytes"
    inbound = Inbound(path, path.encode(), Work.GENERATE, [])
    inbound.body = body
    changes: tuple[tuple[str, Callable[[], bytes]], ...] = (
        ("model", lambda: with_model(body, b"", "other")),
        ("cache_salt", lambda: _TENANTS.salted(inbound, b"")),
    )
    for name, change in changes:
        try:
            sent = json.loads(change())
        except Refusal:
            continue
        except ValueError as error:
            return f"with another {name} it is no JSON any more: {error}"
        if _but(name, found) != _but(name, sent) or sent[name] == found.get(name):
            return f"with another {name} it is {sent}"
    return ""


def _but(name: str, fields: dict[str, Any]) -> str:
    return repr(sorted(item for item in fields.items() if item[0] != name))


def _prompts(prompt: Any) -> tuple[int | None, int] | None:
    """(tokens, prompts) of what is certain; None: it is not."""
    if isinstance(prompt, str):
        return None, 1
    if isinstance(prompt, list) and prompt:
        if all(type(each) is str for each in prompt):
            return None, len(prompt)
        if all(type(each) is int for each in prompt):
            return len(prompt), 1
        if all(type(each) is list and each for each in prompt) and all(
            type(token) is int for each in prompt for token in each
        ):
            return sum(map(len, prompt)), len(prompt)
    return None


# Numbers


_NUMBERS = (
    b"5", b"-0", b"0", b"5.0", b"5.5", b"5e0", b"1e3", b'"5"', b'"5.0"', b'" 5 "', b'"1_0"',
    b"true", b"false", b"null", b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551616", b"1e308", b"1e999", b'"0x5"', b'"+5"', b'"\\u0035"', b"[5]",
    b'{"n":5}', b"NaN", b"-1", b'"5.00"', b'"5."', b"4611686018427387904.0", b'"1__0"', b'"_1"',
    b'"1_"', b'"\xd9\xa5"',
    b"0.0", b'"-5"',
)  # fmt: skip
_scalar = msgspec.json.Decoder(int | float | str | bool | None).decode
_pydantic = TypeAdapter(int | None)


def _numbers(rng: random.Random) -> ShortWay:
    def draw() -> bytes:
        return _joined(rng, list(_NUMBERS), lambda raw: mutated_bytes(rng, raw)).strip(b" \t\r\n")

    def differs(raw: bytes) -> tuple[bool, str]:
        try:
            fast = _scalar(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False, ""  # what the short way cannot read is left to the long one
        try:
            slow = json.loads(raw)
        except (ValueError, RecursionError) as error:
            return True, f"msgspec reads {fast!r}, json: {error}"
        if whole_numbers.decode(raw) is ...:
            return True, f"msgspec reads {fast!r}, the long way nothing"
        short, long = _number(fast), _number(slow)
        if short != long:
            return True, f"at once {short}, in steps {long}"
        try:
            known: Any = _pydantic.validate_python(slow)
        except ValidationError:
            known = ...
        if long is not ... and known is not ... and (long != known):
            return True, f"here {long}, by pydantic {known}"
        if long is ... and known is not ... and abs(known) <= whole_numbers.MOST_TOKENS:
            return True, f"refused here, by pydantic {known}"
        return long is not ..., ""

    return ShortWay(draw, differs)


def _number(value: Any) -> Any:
    """``...``: refused; what is larger than any engine counts is so a moment later."""
    try:
        number = whole_numbers.read(value, "n")
        if number is not None:
            whole_numbers.check(number, "n", -whole_numbers.MOST_TOKENS, whole_numbers.MOST_TOKENS)
    except Refusal:
        return ...
    return number


# Keys that were right before


_KEYS = (b"key-of-alpha-0123456789", b"key-of-beta-01234567890", b"key-that-nobody-has-1234")


def _admissions() -> Iterator[Admission]:
    from hashlib import sha256

    hashes = [sha256(key).hexdigest() for key in _KEYS[:2]]
    keys = [{"name": f"k{i}", "hash": f"sha256:{hash_}"} for i, hash_ in enumerate(hashes)]
    while True:
        yield Admission("the-one-key", KeysFile.model_validate({"keys": keys}))


def _credentials(rng: random.Random) -> ShortWay:
    admissions = _admissions()
    warm, cold = next(admissions), next(admissions)

    def draw() -> list[tuple[bytes, bytes]]:
        headers = [(b"host", b"x"), (b"accept", b"*/*")]
        names = [b"authorization", b"x-api-key", b"x-other"]  # a head has each of them once
        for name in rng.sample(names, rng.randint(0, 3)):
            key = rng.choice((*_KEYS, b"the-one-key"))
            scheme = rng.choice((b"Bearer ", b"bearer ", b"Bearer  ", b"Basic ", b"", b"BEARER\t"))
            value = key if name == b"x-api-key" and rng.random() < 0.8 else scheme + key
            if rng.random() < 0.1:
                value = mutated_bytes(rng, value)
            headers.insert(rng.randrange(len(headers) + 1), (name, value))
        return headers

    def differs(headers: list[tuple[bytes, bytes]]) -> tuple[bool, str]:
        cold.set_keys(cold.keys)  # type: ignore[arg-type]  # what was right is forgotten
        target = b"/v1/completions"
        inbound = Inbound("/v1/completions", target, Work.GENERATE, headers, dict(headers))
        known, unknown = _client(warm, headers, inbound.authorization), _client(cold, headers)
        if known != unknown:
            return True, f"known {known}, unknown {unknown}"
        return known is not None, ""

    return ShortWay(draw, differs)


def _client(
    admission: Admission, headers: list[tuple[bytes, bytes]], authorization: bytes = b""
) -> str | None:
    try:
        return admission.client_of(headers, authorization).name
    except Refusal:
        return None


SHORT_WAYS: dict[str, Callable[[random.Random], ShortWay]] = {
    "chunks": _chunks,
    "requests": _requests,
    "known heads": _known_heads,
    "answers": _answers,
    "bodies": _bodies,
    "numbers": _numbers,
    "credentials": _credentials,
}


async def fuzz_short_ways(seed: int, count: int) -> Findings:
    """``count`` inputs for each short way."""
    findings = Findings()
    for number, (name, make) in enumerate(SHORT_WAYS.items()):
        way = make(random.Random(seed * 100 + number))
        for _ in range(count):
            drawn = way.draw()
            accepted, difference = way.differs(drawn)
            findings.sent += 1
            findings.statuses[_ACCEPTED if accepted else _REFUSED] += 1
            if difference:
                findings.add(f"{name}: {difference}", repr(drawn).encode())
    return findings
