"""Seeded mutation of bytes, of JSON documents and of HTTP heads. Nothing here does I/O."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

# Literals, because json.dumps cannot write some of them.
_LITERALS = (
    "0", "-0", "-1", "1", "2147483648", "9223372036854775808", "18446744073709551616",
    "1000000000000000000", "1e308", "1e310", "-1e308", "1e-320", "0.5", "1.0", "NaN", "Infinity",
    "1" + "0" * 310, "-1" + "0" * 310, "9" * 5000, "null", "true", "false", '""', '"0"',
    '"\\ud800"', '"\\u0000"', '"\\"', "[]", "{}", "[[]]", "[null]", '{"":{}}', "[1,2,3]",
    "[" * 60 + "]" * 60, "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000,
    "[" + ",".join(["[]"] * 3000) + "]", "[" + ",".join(['""'] * 3000) + "]",
    '"' + "x" * 30000 + '"', '"' + "\\n" * 10000 + '"', '"' + "é" * 5000 + '"',
)  # fmt: skip
_BYTES = (
    b"", b"\0", b"\xff", b"\xc3\x28", b"\xef\xbb\xbf", b'"', b"\\", b"{", b"}", b"[", b"]", b",",
    b":", b" " * 1000, b"\r\n", b"\xed\xa0\x80", b'"n":1', b'"stream":true,',
)  # fmt: skip
_LINES = (
    b"Transfer-Encoding: chunked", b"transfer-encoding: gzip, chunked", b"Transfer-Encoding: ",
    b"transfer-encoding:\x0bchunked", b"Transfer-Encoding : chunked", b"Transfer-Encoding: chunke",
    b"Transfer-Encoding: identity", b"Content-Length: 0", b"Content-Length: +5",
    b"Content-Length: 5, 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999",
    b"Content-Length:", b"Content-Length: 0x10", b"Connection: close", b"Connection: keep-alive",
    b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAoAAAAAI",
    b"Upgrade: websocket", b"Connection: x-request-id, host, content-length",
    b"Expect: 100-continue", b"Expect: 200-ok", b"Host: other", b"Host:", b"Host: a b", b" folded",
    b"\tfolded", b"X: " + b"y" * 70_000, b"X-" + b"z" * 9000 + b": 1", b"no colon", b": no name",
    b"X\0: 1", b"X: \0", b"X: a\rb", b"X: \x80\xff", b"TE: trailers", b"Trailer: x-request-id",
    b"Keep-Alive: timeout=5", b"Proxy-Connection: keep-alive", b"Accept-Encoding: gzip",
    b"Authorization: Bearer x", b"x-request-id: " + b"r" * 5000, b"x-request-id: a\tb",
    b"x-hetero-gateway-instance: i0", b"Content-Type: text/plain", b"Content-Encoding: gzip",
)  # fmt: skip
_TARGETS = (
    b"/v1/completions", b"/v1/../sleep", b"/v1/%2e%2e/sleep", b"/v1//completions", b"//sleep",
    b"/sleep", b"/v1/completions/", b"/V1/completions", b"/v1/completions?x=1", b"*",
    b"/v1/completions#x", b"http://other/v1/completions", b"/v1/completions%00", b"/\xff",
    b"/v1/chat/completions;x", b"/" + b"p" * 20_000, b"/reset_prefix_cache", b"v1/completions",
    b"/v1/%63ompletions", b"/v1/chat%2fcompletions", b"/admin/../v1/completions",
)  # fmt: skip
_VERSIONS = (b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 ", b"")


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """One to four small changes anywhere."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(5)
        if kind == 0 and changed:
            changed[at % len(changed)] = rng.randrange(256)
        elif kind == 1:
            del changed[at : at + rng.randint(1, 20)]
        elif kind == 2:
            changed[at:at] = rng.choice(_BYTES)
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.randint(1, 50)]
        else:
            changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 8)))
    return bytes(changed)


def mutated_json(rng: random.Random, document: Any) -> bytes:
    """A document with one to three nodes that are something else, or keys that come twice."""
    changed, marks = copy.deepcopy(document), {}
    for _ in range(rng.randint(1, 3)):
        slots = _slots(changed)
        if not slots:
            break
        container, key = rng.choice(slots)
        kind = rng.randrange(8)
        if kind == 0 and isinstance(container, dict):
            container[_word(rng)] = container.pop(key)
        elif kind == 1:
            del container[key]
        else:
            # Put in as text once all is written.
            mark = f"@@{len(marks)}-{rng.getrandbits(30)}@@"
            marks[mark] = rng.choice(_LITERALS)
            container[key] = mark
    text = json.dumps(changed)
    for mark, literal in marks.items():
        text = text.replace(json.dumps(mark), literal)
    if rng.random() < 0.1 and text.startswith("{"):
        text = text[:1] + f'"{_word(rng)}":{rng.choice(_LITERALS)},' + text[1:]
    return text.encode("utf-8", "surrogatepass")


def _word(rng: random.Random) -> str:
    return rng.choice(
        ("n", "model", "prompt", "messages", "max_tokens", "stream", "best_of", "", "x")
    )


def _slots(document: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    open_: list[Any] = [document]
    while open_:
        node = open_.pop()
        keys: Any = ()
        if isinstance(node, dict):
            keys = list(node)
        elif isinstance(node, list):
            keys = range(len(node))
        for key in keys:
            found.append((node, key))
            open_.append(node[key])
    return found


def mutated_head(rng: random.Random, request: bytes) -> bytes:
    """A request (head, body) whose head is changed line by line, and now and then anywhere."""
    head, blank, body = request.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    changes: tuple[Callable[[], None], ...] = (
        lambda: lines.insert(rng.randrange(len(lines) + 1), rng.choice(_LINES)),
        lambda: lines.insert(rng.randrange(len(lines) + 1), rng.choice(_LINES)),
        lambda: lines.append(rng.choice(lines) if lines else b""),
        lambda: lines.pop(rng.randrange(len(lines))) and None if lines else None,
        lambda: rng.shuffle(lines),
    )
    for _ in range(rng.randint(1, 3)):
        rng.choice(changes)()
    if rng.random() < 0.3:
        method, target, version = (*first.split(b" "), b"", b"")[:3]
        kind = rng.randrange(3)
        if kind == 0:
            target = rng.choice(_TARGETS)
        elif kind == 1:
            version = rng.choice(_VERSIONS)
        else:
            method = rng.choice(
                (b"GET", b"HEAD", b"PUT", b"post", b"CONNECT", b"PRI", b"", b"P\0ST")
            )
        first = b" ".join((method, target, version))
    ending = rng.choice((b"\r\n",) * 8 + (b"\n", b"\r"))
    changed = ending.join([first, *lines]) + (blank if ending == b"\r\n" else ending * 2) + body
    return mutated_bytes(rng, changed) if rng.random() < 0.2 else changed
