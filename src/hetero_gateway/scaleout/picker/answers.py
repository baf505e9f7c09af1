"""The picker's answers to the data plane: gRPC messages, as bytes on the wire.

Parts that do not depend on the request are made once, per process or per instance, so that a usual
request serialises nothing.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from hetero_gateway.errors import Refusal
from hetero_gateway.http.errors import error_body
from hetero_gateway.http.headers import CREDENTIALS
from hetero_gateway.scaleout.picker.http2.frames import MESSAGE_HEAD_BYTES, message
from hetero_gateway.scaleout.picker.protocol.messages_pb2 import (
    CommonResponse,
    HeaderMutation,
    HeaderValue,
    HeaderValueOption,
    ImmediateResponse,
    PartResponse,
    ProcessingResponse,
    TrailersResponse,
)

# Endpoint picker protocol 004, v1.0.0: the header, and the same key of the dynamic metadata.
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

_OVERWRITE = 2  # OVERWRITE_IF_EXISTS_OR_ADD
# As ext_proc recommends for one message of a streamed body.
_CHUNK_BYTES = 62 * 1024


def _message(answer: ProcessingResponse) -> bytes:
    return message(answer.SerializeToString())


GO_ON_TO_BODY = _message(ProcessingResponse(request_headers=PartResponse()))
REQUEST_TRAILERS = _message(ProcessingResponse(request_trailers=TrailersResponse()))
RESPONSE_TRAILERS = _message(ProcessingResponse(response_trailers=TrailersResponse()))
RESPONSE_HEADERS = _message(ProcessingResponse(response_headers=PartResponse()))
RESPONSE_BODY = _message(ProcessingResponse(response_body=PartResponse()))


class Destination:
    """The ready answers of one instance.

    Attributes:
        endpoint: ``ip:port``.
        in_headers, in_body: the destination, in answer to a request's head or buffered body.
        served: names the instance in the response's head.
    """

    __slots__ = ("endpoint", "in_body", "in_headers", "served")

    def __init__(
        self, endpoint: str, instance_id: str, api_key: str | None, *, drops_credentials: bool
    ) -> None:
        self.endpoint = endpoint
        mutation = HeaderMutation(set_headers=[_header(DESTINATION, endpoint)])
        if api_key is not None:
            mutation.set_headers.append(_header("authorization", f"Bearer {api_key}"))
            mutation.remove_headers.append("x-api-key")
        elif drops_credentials:
            mutation.remove_headers.extend(sorted(name.decode() for name in CREDENTIALS))
        part = PartResponse(response=CommonResponse(header_mutation=mutation))
        self.in_headers = _with_metadata(ProcessingResponse(request_headers=part), endpoint)
        self.in_body = _with_metadata(ProcessingResponse(request_body=part), endpoint)
        named = HeaderMutation(set_headers=[_header("x-hetero-gateway-instance", instance_id)])
        part = PartResponse(response=CommonResponse(header_mutation=named))
        self.served = _message(ProcessingResponse(response_headers=part))


# Tickets of one length, so that everything before them is the same too.
TICKET_DIGITS = 20
TICKET_NAMESPACE = "hetero_gateway"


def _ticket_prefix() -> bytes:
    answer, ticket = ProcessingResponse(), "0" * TICKET_DIGITS
    answer.dynamic_metadata.update({TICKET_NAMESPACE: {"ticket": ticket}})
    encoded = answer.SerializeToString()
    assert encoded.endswith(ticket.encode())
    return encoded[:-TICKET_DIGITS]


_TICKET_PREFIX = _ticket_prefix()


def with_ticket(answer: bytes, ticket: bytes) -> bytes:
    """A destination's answer that gives the data plane a ticket for reports on the response.

    Two concatenated encoded messages are one message with the fields of both, merged.
    """
    return message(answer[MESSAGE_HEAD_BYTES:] + _TICKET_PREFIX + ticket)


def changed(
    answer: bytes,
    path: bytes | None,
    removed: Iterable[str],
    added: Iterable[tuple[str, str]] = (),
) -> bytes:
    """A destination's answer that also changes the request's path, or its other header fields."""
    whole = ProcessingResponse.FromString(answer[MESSAGE_HEAD_BYTES:])
    mutation = getattr(whole, whole.WhichOneof("response") or "").response.header_mutation
    if path is not None:
        mutation.set_headers.append(_header(":path", path))
    names = {name for name, _ in added}
    mutation.set_headers.extend(_header(*pair) for pair in added)
    mutation.remove_headers.extend(name for name in removed if name not in names)
    return _message(whole)


def streamed(body: bytes, *, ends: bool, of_request: bool) -> Iterator[bytes]:
    """A body given back piece by piece, as FULL_DUPLEX_STREAMED requires.

    Args:
        ends: no trailers follow.
    """
    for at in range(0, len(body) or 1, _CHUNK_BYTES):
        piece = body[at : at + _CHUNK_BYTES]
        before, behind = _around(len(piece), ends and at + len(piece) == len(body), of_request)
        yield before + piece + behind


@lru_cache(1024)
def _around(size: int, ends: bool, of_request: bool) -> tuple[bytes, bytes]:
    """A message without its piece: making one is half the cost of giving the piece back."""
    answer = ProcessingResponse()
    part = answer.request_body if of_request else answer.response_body
    piece = part.response.body_mutation.streamed_response
    piece.body, piece.end_of_stream = bytes(size), ends
    encoded = _message(answer)
    end = len(encoded) - 2 * ends  # a tag and a flag
    return encoded[: end - size], encoded[end:]


def refused(refusal: Refusal, path: str, request_id: bytes) -> bytes:
    """An error of the picker's own, with OpenAI's body."""
    headers: list[tuple[str, str | bytes]] = []
    if refusal.retry_after_s is not None:
        headers.append(("retry-after", str(refusal.retry_after_s)))
    if request_id:
        headers.append(("x-request-id", request_id))
    headers += [(name.decode(), value) for name, value in refusal.headers]
    return immediate(refusal.status, error_body(refusal, path), headers, refusal.code)


def immediate(
    status: int, body: bytes, headers: Iterable[tuple[str, str | bytes]] = (), details: str = ""
) -> bytes:
    """A JSON response that the data plane should send instead of an instance's."""
    answer = ImmediateResponse(body=body, details=details)
    answer.status.code = status
    answer.headers.set_headers.append(_header("content-type", "application/json"))
    for name, value in headers:
        answer.headers.set_headers.append(_header(name, value))
    return _message(ProcessingResponse(immediate_response=answer))


def wait_longer(timeout_s: float) -> bytes:
    """Asks the data plane to wait this long for the actual answer."""
    answer = ProcessingResponse()
    answer.override_message_timeout.FromNanoseconds(round(timeout_s * 1e9))
    return _message(answer)


def _with_metadata(answer: ProcessingResponse, endpoint: str) -> bytes:
    """Header and metadata must be equal: a data plane may look at either."""
    answer.dynamic_metadata.update({LB_NAMESPACE: {DESTINATION: endpoint}})
    return _message(answer)


def _header(name: str, value: str | bytes) -> HeaderValueOption:
    raw = value if isinstance(value, bytes) else value.encode("latin-1")
    return HeaderValueOption(header=HeaderValue(key=name, raw_value=raw), append_action=_OVERWRITE)
