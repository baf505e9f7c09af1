"""/v1/files, /v1/uploads and /v1/batches, as OpenAI's SDKs use them."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_gateway.errors import Refusal
from hetero_gateway.files.batch_lines import ENDPOINTS, window_s
from hetero_gateway.serve.batches.files import Document, Incoming
from hetero_gateway.serve.batches.service import Batches
from hetero_gateway.serve.control.public import PlainPath
from hetero_gateway.serve.control.uploads import read_form
from hetero_gateway.serve.wiring.gateway import Gateway

_T = TypeVar("_T")

_MOST_BODY_BYTES = 1 << 20
_MOST_LISTED, _LISTED_FILES, _LISTED_BATCHES = 10_000, 1000, 20
_MOST_BATCHES_LISTED = 100
_WHOLE = re.compile(r"[0-9]{1,9}")
_METADATA = 16, 64, 512  # pairs, characters of a key and of a value, OpenAI's limits
_MOST_NAME_CHARACTERS = 255
_MOST_PARTS = 10_000


class _Created(msgspec.Struct):
    input_file_id: str
    completion_window: str = "24h"
    endpoint: str | None = None
    metadata: dict[str, str] | None = None


class _Upload(msgspec.Struct):
    filename: str
    bytes: int
    purpose: str = "batch"


class _Completed(msgspec.Struct):
    part_ids: list[str]


class _Incoming:
    """An uploaded file, for ``read_form``: another thread writes to the disk."""

    def __init__(self, batches: Batches, begin: Callable[..., Incoming], *args: str) -> None:
        self._batches = batches
        self._begin = begin, args
        self.incoming: Incoming | None = None

    async def begin(self) -> None:
        begin, args = self._begin
        self.incoming = await self._batches.ask(begin, *args)

    async def write(self, data: bytes) -> None:
        assert self.incoming is not None
        await self._batches.ask(self.incoming.write, data)

    async def bring(self) -> None:
        """The whole file has arrived."""
        assert self.incoming is not None
        await self._batches.bring(self.incoming)

    async def drop(self) -> None:
        if self.incoming is not None:
            await self._batches.call(self._batches.files.drop, self.incoming)


class _Paths:
    """The handlers. Each first identifies the client, then answers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def _who(self, request: Request) -> tuple[Batches, str]:
        """Raises Refusal: 401, 503."""
        client = self._gateway.admission.client_of(request.headers.raw)
        batches = self._gateway.batches
        assert batches is not None
        batches.check_open()
        return batches, client.name

    # Files

    async def files(self, request: Request) -> Response:
        """The key's files, or a new one: a form with `file` and `purpose` (batch)."""
        batches, owner = self._who(request)
        if request.method == "POST":
            sink = _Incoming(batches, batches.files.begin, owner)
            try:
                form = await read_form(request, "file", sink)
                _check_purpose(form.fields.get("purpose", "batch"))
                keep_s = _whole(form.fields, "expires_after[seconds]", None, 2**31)
                await sink.bring()
                document = await batches.ask(
                    batches.files.add, owner, sink.incoming, form.filename, keep_s
                )
            except BaseException:
                await sink.drop()
                raise
            return JSONResponse(document)
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise _bad("order must be asc or desc.", "order")
        limit = _whole(query, "limit", _LISTED_FILES, _MOST_LISTED)
        return JSONResponse(
            await batches.ask(
                batches.files.listed, owner, query.get("after"), limit, order, query.get("purpose")
            )
        )

    async def file(self, request: Request) -> Response:
        """A file's description; or delete it."""
        batches, owner = self._who(request)
        wanted = request.path_params["file_id"]
        if request.method == "DELETE":
            return JSONResponse(await batches.ask(batches.files.delete, owner, wanted))
        return JSONResponse(await batches.ask(batches.files.document, owner, wanted))

    async def content(self, request: Request) -> Response:
        """The file's content."""
        batches, owner = self._who(request)
        row = await batches.ask(batches.files.row, owner, request.path_params["file_id"])
        return batches.files.blobs.response(row["id"], row["bytes"])

    # Uploads

    async def uploads(self, request: Request) -> Response:
        """A file to be sent in parts: its `filename`, `bytes` and `purpose`."""
        batches, owner = self._who(request)
        asked = await _body(request, _Upload)
        _check_purpose(asked.purpose)
        if asked.bytes < 0:
            raise _bad("bytes must be 0 or more.", "bytes")
        name = "".join(c if c.isprintable() else "?" for c in asked.filename)
        return JSONResponse(
            await batches.ask(
                batches.files.begin_upload, owner, name[-_MOST_NAME_CHARACTERS:], asked.bytes
            )
        )

    async def parts(self, request: Request) -> Response:
        """A part: a form with `data`."""
        batches, owner = self._who(request)
        upload_id = request.path_params["upload_id"]
        sink = _Incoming(batches, batches.files.begin_part, owner, upload_id)
        try:
            await read_form(request, "data", sink)
            await sink.bring()
            document = await batches.ask(batches.files.add_part, owner, upload_id, sink.incoming)
        except BaseException:
            await sink.drop()
            raise
        return JSONResponse(document)

    async def complete(self, request: Request) -> Response:
        """Join the parts, in the order of `part_ids`, into the file."""
        batches, owner = self._who(request)
        asked = await _body(request, _Completed)
        if len(asked.part_ids) > _MOST_PARTS:
            raise _bad(f"An upload may have {_MOST_PARTS} parts.", "part_ids")
        upload_id = request.path_params["upload_id"]
        return JSONResponse(await batches.join(owner, upload_id, asked.part_ids))

    async def cancel_upload(self, request: Request) -> Response:
        """Accept no more parts, and remove those received."""
        batches, owner = self._who(request)
        wanted = request.path_params["upload_id"]
        return JSONResponse(await batches.ask(batches.files.cancel_upload, owner, wanted))

    # Batches

    async def batches(self, request: Request) -> Response:
        """The key's batches, newest first, or a new one."""
        batches, owner = self._who(request)
        if request.method == "POST":
            asked = await _body(request, _Created)
            if asked.endpoint is not None and asked.endpoint not in ENDPOINTS:
                message = f"endpoint must be one of {', '.join(ENDPOINTS)}."
                raise Refusal(400, "invalid_endpoint", message, param="endpoint")
            seconds = window_s(asked.completion_window)
            if seconds is None:
                message = "completion_window must be a duration up to a year: 24h, 90m, 1d12h."
                raise _bad(message, "completion_window")
            window = asked.completion_window, seconds
            metadata = _checked(asked.metadata or {})
            return JSONResponse(
                batches.with_outlook(
                    await batches.create(
                        owner, asked.input_file_id, asked.endpoint, window, metadata
                    )
                )
            )
        query = request.query_params
        limit = _whole(query, "limit", _LISTED_BATCHES, _MOST_BATCHES_LISTED)
        listed = await batches.ask(batches.ledger.listed, owner, query.get("after"), limit)
        listed["data"] = [batches.with_outlook(each) for each in listed["data"]]
        return JSONResponse(listed)

    async def batch(self, request: Request) -> Response:
        """A batch's progress, and when it is likely to end."""
        batches, owner = self._who(request)
        wanted = request.path_params["batch_id"]
        return JSONResponse(
            batches.with_outlook(await batches.ask(batches.ledger.document, owner, wanted))
        )

    async def cancel(self, request: Request) -> Response:
        """Send no more of its lines; those already sent may finish."""
        batches, owner = self._who(request)
        return JSONResponse(await batches.cancel(owner, request.path_params["batch_id"]))


def batch_paths(gateway: Gateway) -> list[PlainPath]:
    """The routes, if ``batches`` are configured."""
    paths = _Paths(gateway)
    form = {"multipart/form-data": {"schema": _FORM}}
    part = {"multipart/form-data": {"schema": _PART}}

    def path(
        name: str,
        answer: Callable[[Request], Awaitable[Response]],
        method: str,
        content: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> PlainPath:
        extra: dict[str, Any] = {
            "parameters": [
                *(_parameter(each, "path", _ID) for each in re.findall(r"\{(\w+)\}", name)),
                *(_parameter(each, "query", schema) for each, schema in (query or {}).items()),
            ]
        }
        if content is not None:
            extra["requestBody"] = {"required": True, "content": content}
        return PlainPath(name, answer, "batches", dict[str, Any], (method,), extra)

    return [
        path("/v1/files", paths.files, "GET", query=_PAGE | _OF_FILES),
        path("/v1/files", paths.files, "POST", form),
        path("/v1/files/{file_id}", paths.file, "GET"),
        path("/v1/files/{file_id}", paths.file, "DELETE"),
        path("/v1/files/{file_id}/content", paths.content, "GET"),
        path("/v1/uploads", paths.uploads, "POST", _json(_UPLOAD)),
        path("/v1/uploads/{upload_id}/parts", paths.parts, "POST", part),
        path("/v1/uploads/{upload_id}/complete", paths.complete, "POST", _json(_COMPLETED)),
        path("/v1/uploads/{upload_id}/cancel", paths.cancel_upload, "POST"),
        path("/v1/batches", paths.batches, "GET", query=_PAGE),
        path("/v1/batches", paths.batches, "POST", _json(_CREATED)),
        path("/v1/batches/{batch_id}", paths.batch, "GET"),
        path("/v1/batches/{batch_id}/cancel", paths.cancel, "POST"),
    ]


# Their part of /openapi.json
_TEXT: Document = {"type": "string"}
_ID: Document = {"type": "string", "minLength": 1}
_PAGE: Document = {"after": _TEXT, "limit": {"type": "integer", "minimum": 1}}
_OF_FILES: Document = {"order": {"enum": ["asc", "desc"]}, "purpose": _TEXT}
_PURPOSE: Document = {"enum": ["batch"]}
_FORM: Document = {
    "type": "object",
    "properties": {"purpose": _PURPOSE, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
}
_PART: Document = {
    "type": "object",
    "properties": {"data": {"type": "string", "format": "binary"}},
    "required": ["data"],
}
_UPLOAD: Document = {
    "type": "object",
    "properties": {
        "filename": _TEXT,
        "bytes": {"type": "integer", "minimum": 0},
        "purpose": _PURPOSE,
    },
    "required": ["filename", "bytes", "purpose"],
}
_COMPLETED: Document = {
    "type": "object",
    "properties": {"part_ids": {"type": "array", "items": _TEXT}},
    "required": ["part_ids"],
}
_CREATED: Document = {
    "type": "object",
    "properties": {
        "input_file_id": _TEXT,
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {"type": "string", "examples": ["24h"]},
        "metadata": {"type": "object", "additionalProperties": _TEXT},
    },
    "required": ["input_file_id"],
}


def _parameter(name: str, place: str, schema: Document) -> Document:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _json(schema: Document) -> Document:
    return {"application/json": {"schema": schema}}


# Parsing requests


def _bad(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, "invalid_request", message, param=param)


def _check_purpose(purpose: str) -> None:
    if purpose != "batch":
        raise _bad("purpose must be batch: files are used for nothing else.", "purpose")


def _whole(fields: Mapping[str, str], name: str, default: int | None, most: int) -> int | None:
    """A number from 1 to ``most``. Raises Refusal."""
    text = fields.get(name)
    if text is None:
        return default
    if not _WHOLE.fullmatch(text) or not 1 <= int(text) <= most:
        raise _bad(f"{name} must be a whole number from 1 to {most}.", name)
    return int(text)


def _checked(metadata: Mapping[str, str]) -> Mapping[str, str]:
    pairs, key, value = _METADATA
    if len(metadata) > pairs or any(len(k) > key or len(v) > value for k, v in metadata.items()):
        message = f"metadata may have {pairs} pairs of up to {key} and {value} characters."
        raise _bad(message, "metadata")
    return metadata


async def _body(request: Request, wanted: type[_T]) -> _T:
    """Raises Refusal: 400, 413."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MOST_BODY_BYTES:
            message = f"The request body is larger than {_MOST_BODY_BYTES} bytes."
            raise Refusal(413, "request_too_large", message)
    try:
        return msgspec.json.decode(data, type=wanted)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error) if isinstance(error, msgspec.DecodeError) else "it is no JSON"
        raise _bad(f"The body does not fit: {text}.") from error
