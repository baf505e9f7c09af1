"""A form with one file, streamed from the connection to the disk, one read at a time in memory."""

from typing import Any, NamedTuple, Protocol

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from hetero_gateway.errors import Refusal

_MOST_FIELD_BYTES, _MOST_PARTS = 4096, 16
_MOST_HEADER_BYTES = 4096
# Bytes written together.
_WRITTEN_BYTES = 1 << 18
_MOST_NAME_CHARACTERS = 255


class Sink(Protocol):
    """The destination of the file; each call is awaited."""

    async def begin(self) -> None: ...
    async def write(self, data: bytes) -> None: ...


class Form(NamedTuple):
    """The other fields of the form, and the name of its file."""

    fields: dict[str, str]
    filename: str


def _bad(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, "invalid_request", message, param=param)


class _Reader:
    """Receives the parser's callbacks."""

    def __init__(self, file_field: str) -> None:
        self._file_field = file_field
        self.fields: dict[str, bytearray] = {}
        self.filename: str | None = None
        self.pieces: list[bytes] = []  # of the file, to be written
        self.ended = False
        self._parts = 0
        self._name, self._value = bytearray(), bytearray()
        self._header_bytes = 0
        self._disposition = b""
        self._field: str | None = None  # None: it is the file's part

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_begin": self._header_begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _bad("The form has too many parts.")
        self._disposition, self._header_bytes = b"", 0

    def _header_begin(self) -> None:
        self._name, self._value = bytearray(), bytearray()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MOST_HEADER_BYTES:
            raise _bad("A part of the form has too long a head.")

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)

    def _headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == self._file_field:
            if self.filename is not None:
                raise _bad(f"The form has more than one `{name}`.", name)
            told = options.get(b"filename", b"").decode("utf-8", "replace")
            shown = "".join(c if c.isprintable() else "?" for c in told)
            self.filename = shown[-_MOST_NAME_CHARACTERS:]
            self._field = None
        else:
            self._field = name
            self.fields[name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.pieces.append(data[start:end])
            return
        value = self.fields[self._field]
        value += data[start:end]
        if len(value) > _MOST_FIELD_BYTES:
            raise _bad("A field of the form is too long.")

    def _end(self) -> None:
        self.ended = True


async def read_form(request: Request, file_field: str, sink: Sink) -> Form:
    """Read a form whose file is in the field of that name, and write the file into the sink.

    Raises:
        Refusal: 400, and the sink's errors.
        ClientDisconnect: it left before the end.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 256:
        raise _bad("The body must be multipart/form-data.")
    reader = _Reader(file_field)
    parser = MultipartParser(boundary, reader.callbacks())
    begun, waiting = False, 0
    try:
        async for chunk in request.stream():
            parser.write(chunk)
            if reader.filename is not None and not begun:
                begun = True
                await sink.begin()
            waiting += len(chunk)
            if waiting >= _WRITTEN_BYTES:
                waiting = 0
                await _write(reader, sink)
    except MultipartParseError as error:
        raise _bad("The form is malformed.") from error
    if not reader.ended:
        raise _bad("The form has no end.")
    if reader.filename is None:
        raise _bad(f"The form has no `{file_field}`.", file_field)
    await _write(reader, sink)
    fields = {name: value.decode("utf-8", "replace") for name, value in reader.fields.items()}
    return Form(fields, reader.filename)


async def _write(reader: _Reader, sink: Sink) -> None:
    pieces, reader.pieces = reader.pieces, []
    if pieces:
        await sink.write(b"".join(pieces))
