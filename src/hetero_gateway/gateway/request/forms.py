"""The fields of a form (multipart/form-data), in the one spelling that is accepted.

Engines read forms with python-multipart, which accepts several spellings of a name: quoted,
escaped, in another character set, continued. A reader that differs from the engine in any of them
can be shown another field than the engine sees. So only one is accepted: what browsers, curl and
client libraries write. Anything else is 400, however an engine would read it.

A recording may have 64 MB: it is searched for the boundary in steps, and not copied.
"""

from __future__ import annotations

import re

from hetero_gateway.engines.vllm import Prompts, prompts_at
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.turns import Steps
from hetero_gateway.http.headers import Headers

_TYPE = re.compile(rb'multipart/form-data((?:[ \t]*;[ \t]*[\w-]+=(?:"[^"\\]*"|[^ \t;"]+))+)', re.I)
_PARAMETER = re.compile(rb';[ \t]*([\w-]+)=(?:"([^"\\]*)"|([^ \t;"]+))')
# RFC 2046, 5.1.1.
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
# A name in another character set would be another name.
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii")
_HEAD = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r\n){1,16}\r\n")
_FIELD = re.compile(rb"([^:\r\n]+):[ \t]*([^\r\n]*?)[ \t]*\r\n")
_DISPOSITION = re.compile(
    rb'form-data[ \t]*;[ \t]*name="([^"\\%\x80-\xff]{1,256})"'
    rb'(?:[ \t]*;[ \t]*filename="[^"\\]*"(?:[ \t]*;[ \t]*filename\*=[^ \t;"]+)?)?',
    re.I,
)
# starlette's own limit is 1000 fields and 1000 files.
_MOST_PARTS = 1000
_MOST_HEAD_BYTES = 4096
_STEP_BYTES = 1 << 20

# The position of a value in the body.
Span = tuple[int, int]


# The values of a form: the last of equal names, as engines take it.
Form = dict[str, Span]


def is_form(path: str, content_type: bytes) -> bool:
    """Whether a body is to be read as a form: only where the engine does, too."""
    return prompts_at(path) is Prompts.SPEECH and content_type[:10].lower() == b"multipart/"


def check_one_type(headers: Headers) -> None:
    """Raises Refusal: 400 for a request with several Content-Type fields: engines take the first,
    others the last.
    """
    if sum(name == b"content-type" for name, _ in headers) > 1:
        raise Refusal(400, "invalid_header", "A request must have exactly one Content-Type.")


def read_form(body: bytes | bytearray, content_type: bytes) -> Steps[Form]:
    """Read a form. Raises Refusal: 400."""
    line = b"--" + _boundary_of(content_type)
    if not body.startswith(line):
        raise _unusable("it does not begin with its boundary")
    fields: Form = {}
    at, parts = len(line), 0
    while body[at : at + 2] != b"--":
        parts += 1
        if parts > _MOST_PARTS:
            raise _unusable(f"it has more than {_MOST_PARTS} parts")
        if body[at : at + 2] != b"\r\n":
            raise _unusable("a line goes on behind its boundary")
        name, start = _part(body, at + 2)
        if body.startswith(line, start):
            raise _unusable("a part ends within its head")
        end = yield from _find(body, b"\r\n" + line, start)
        fields[name] = start, end
        at = end + 2 + len(line)
    return fields


def _boundary_of(content_type: bytes) -> bytes:
    found = _TYPE.fullmatch(content_type.strip())
    if found is None:
        raise _unusable("its Content-Type is not multipart/form-data; boundary=…")
    boundary = b""
    for name, quoted, plain in _PARAMETER.findall(found[1]):
        value = quoted or plain
        if name.lower() == b"boundary" and not boundary and _BOUNDARY.fullmatch(value):
            boundary = value
        elif name.lower() != b"charset" or value.lower() not in _CHARSETS:
            raise _unusable("its Content-Type has a parameter that it cannot have")
    if not boundary:
        raise _unusable("its Content-Type has no boundary")
    return boundary


def _part(body: bytes | bytearray, at: int) -> tuple[str, int]:
    """(name, position of its value) of the part with this head."""
    head = _HEAD.match(body, at, at + _MOST_HEAD_BYTES)
    if head is None:
        raise _unusable("a part has no head that can be read")
    found = None
    for name, value in _FIELD.findall(head[0]):
        if name.lower() == b"content-disposition":
            if found is not None:
                raise _unusable("a part has two Content-Disposition fields")
            found = _DISPOSITION.fullmatch(value)
            if found is None:
                raise _unusable("a part's Content-Disposition is not form-data with a plain name")
    if found is None:
        raise _unusable("a part has no Content-Disposition")
    return found[1].decode("ascii"), head.end()


def _find(body: bytes | bytearray, text: bytes, start: int) -> Steps[int]:
    while True:
        stop = start + _STEP_BYTES
        found = body.find(text, start, stop + len(text))
        if found >= 0:
            return found
        if stop >= len(body):
            raise _unusable("it has no end")
        start = stop
        yield


def _unusable(why: str) -> Refusal:
    return Refusal(400, "invalid_form", f"The form cannot be used: {why}.")
