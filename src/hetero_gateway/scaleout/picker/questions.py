"""How to read the data plane's messages on a request, and on its response."""

from google.protobuf.message import DecodeError

from hetero_gateway.engines.vllm import names_an_address, work_of_path
from hetero_gateway.errors import Refusal
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.headers import CREDENTIALS, Withheld
from hetero_gateway.http.heads import Inbound
from hetero_gateway.scaleout.picker import answers
from hetero_gateway.scaleout.picker.protocol.messages_pb2 import (
    HttpHeaders,
    Metadata,
    ProcessingRequest,
)

# The fields needed from a request's head: all others are up to the data plane.
_READ_FIELDS = {
    name.decode(): name
    for name in (
        *(b":method", b":path", b"content-length", b"content-type", b"x-request-id"),
        *CREDENTIALS,
    )
}
_ATTRIBUTES = "envoy.filters.http.ext_proc"
_CODE_DETAILS = "response.code_details"
_FROM_INSTANCE = "via_upstream"
# A message with more besides a body than this is not from a data plane: parsed data takes up to 40
# times its bytes, and a message may be as long as a body.
MOST_PLAIN_BYTES = 2**18
# Fields of a request's or response's head. Envoy's own limit is 100 by default.
MOST_FIELDS = 1024
# Top-level fields of a message with a body; it has up to five. And bytes besides the body in its
# part: whether more follows.
_MOST_PARTS = 16
_MOST_REST_BYTES = 16
_REQUEST_BODY, _RESPONSE_BODY = 0x22, 0x2A
_BODY = 0x0A
_LENGTH_DELIMITED = 2


def read_long(data: bytes) -> tuple[ProcessingRequest, bytes]:
    """A message of more than ``MOST_PLAIN_BYTES``, without its body, and the body.

    Raises DecodeError: it is not a ProcessingRequest, or there is more than a body in it.
    """
    at, plain, body = 0, b"", b""
    for _ in range(_MOST_PARTS):
        if at == len(data):
            break
        tag, start = _varint(data, at)
        if tag & 7 != _LENGTH_DELIMITED:
            raise DecodeError("a field of a long message")
        size, start = _varint(data, start)
        end = start + size
        if end > len(data):
            raise DecodeError("a field is longer than its message")
        if tag in (_REQUEST_BODY, _RESPONSE_BODY) and size > MOST_PLAIN_BYTES // 2:
            if body or data[start] != _BODY:
                raise DecodeError("a long message's body")
            length, first = _varint(data, start + 1)
            body, rest = data[first : min(first + length, end)], data[first + length : end]
            if len(body) != length or len(rest) > _MOST_REST_BYTES:
                raise DecodeError("a long message's body")
            plain += b"%c%c%b" % (tag, len(rest), rest)
        else:
            if len(plain) + end - at > MOST_PLAIN_BYTES:
                break
            plain += data[at:end]
        at = end
    if at != len(data) or not body:
        raise DecodeError("a long message that is more than a body")
    return ProcessingRequest.FromString(plain), body


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(a number of up to 35 bits, where it ends)."""
    number = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise DecodeError("a number of a long message")


def inbound_of(head: HttpHeaders, guarded: Withheld) -> tuple[str, Inbound | None, tuple[str, ...]]:
    """(method, the request if it is a POST on an engine path, the fields to remove).

    Args:
        guarded: fields that clients may not set.

    Raises:
        Refusal: 400, 431.
    """
    if len(head.headers.headers) > MOST_FIELDS:
        raise Refusal(
            431, "header_fields_too_large", f"the head has more than {MOST_FIELDS} fields"
        )
    method = target = b""
    headers: list[tuple[bytes, bytes]] = []
    removed: list[str] = []
    for field in head.headers.headers:
        name = _READ_FIELDS.get(field.key)
        if name is None:
            if field.key != answers.DESTINATION and guarded[field.key.encode()]:
                removed.append(field.key)  # except those that the answer sets
            continue
        value = field.raw_value or field.value.encode()
        if name == b"x-request-id" and names_an_address(value):
            removed.append(field.key)
            continue
        if name == b":method":
            method = value
        elif name == b":path":
            target = value
        else:
            headers.append((name, value))
    path = target.partition(b"?")[0].decode("utf-8", "replace")
    work = work_of_path(path) if method == b"POST" else None
    if work is None:
        return f"{method.decode('latin-1')} {path}", None, ()
    try:
        return "POST", Inbound(path, target, work, headers), tuple(removed)
    except ValueError as error:
        raise Refusal(400, "invalid_header", f"a header cannot be used: {error}") from None


def status_of(head: HttpHeaders) -> int:
    """A response's status; 0: it has none."""
    if len(head.headers.headers) > MOST_FIELDS:
        return 0
    for field in head.headers.headers:
        if field.key == ":status":
            value = field.raw_value or field.value.encode()
            return int(value) if value.isdigit() else 0
    return 0


def subset_of(metadata: Metadata) -> list[str] | None:
    """The endpoints to choose from; None: not stated."""
    hint = metadata.filter_metadata.get(answers.SUBSET_NAMESPACE)
    if hint is None or answers.SUBSET not in hint.fields:
        return None
    value = hint.fields[answers.SUBSET]
    if value.HasField("string_value"):  # a list in one string
        return [part.strip() for part in value.string_value.split(",") if part.strip()]
    return [each.string_value for each in value.list_value.values]


def served_of(metadata: Metadata) -> str | None:
    """The endpoint that served the request; None: not stated."""
    told = metadata.filter_metadata.get(answers.LB_NAMESPACE)
    if told is None or answers.SERVED not in told.fields:
        return None
    return told.fields[answers.SERVED].string_value or None


def failure_of(message: ProcessingRequest) -> InstanceError | None:
    """The failure of the instance, if somebody else answers for it."""
    if not message.attributes:
        return None
    attributes = message.attributes.get(_ATTRIBUTES)
    if attributes is None or _CODE_DETAILS not in attributes.fields:
        return None
    details = attributes.fields[_CODE_DETAILS].string_value
    if not details or details == _FROM_INSTANCE:
        return None
    failure = Failure.CONNECT if "connection_failure" in details else Failure.RESET
    return InstanceError(failure, f"the data plane reports {details}"[:200])
