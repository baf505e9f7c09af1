"""What the data plane's messages say of a request, and of the response to it."""

from __future__ import annotations

import logging

from hetero_gateway.engines.vllm import work_of_path
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.failures import Failure, InstanceError
from hetero_gateway.gateway.wire.headers import CREDENTIALS
from hetero_gateway.gateway.wire.inbound import Inbound
from hetero_gateway.picker import answers
from hetero_gateway.picker.protocol.messages_pb2 import (
    HttpHeaders,
    Metadata,
    ProcessingRequest,
)

_log = logging.getLogger(__name__)

# Of a request's head: all others are the data plane's business.
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


def inbound_of(head: HttpHeaders) -> tuple[str, Inbound | None]:
    """(method, the request where it is a POST on an engine path). Raises Refusal: 400."""
    method = target = b""
    headers: list[tuple[bytes, bytes]] = []
    for field in head.headers.headers:
        name = _READ_FIELDS.get(field.key)
        if name is None:
            continue
        value = field.raw_value or field.value.encode()
        if name == b":method":
            method = value
        elif name == b":path":
            target = value
        else:
            headers.append((name, value))
    path = target.partition(b"?")[0].decode("utf-8", "replace")
    work = work_of_path(path) if method == b"POST" else None
    if work is None:
        return f"{method.decode('latin-1')} {path}", None
    try:
        return "POST", Inbound(path, target, work, headers)
    except ValueError as error:
        raise Refusal(400, "invalid_header", f"a header cannot be used: {error}") from None


def status_of(head: HttpHeaders) -> int:
    """Of a response; 0: it has none."""
    for field in head.headers.headers:
        if field.key == ":status":
            value = field.raw_value or field.value.encode()
            return int(value) if value.isdigit() else 0
    return 0


def subset_of(metadata: Metadata) -> list[str] | None:
    """The endpoints to choose from; None: the data plane does not say."""
    hint = metadata.filter_metadata.get(answers.SUBSET_NAMESPACE)
    if hint is None or answers.SUBSET not in hint.fields:
        return None
    value = hint.fields[answers.SUBSET]
    if value.HasField("string_value"):  # a list in one word
        return [part.strip() for part in value.string_value.split(",") if part.strip()]
    return [each.string_value for each in value.list_value.values]


def served_of(metadata: Metadata) -> str | None:
    """The endpoint that served the request; None: the data plane does not say."""
    told = metadata.filter_metadata.get(answers.LB_NAMESPACE)
    if told is None or answers.SERVED not in told.fields:
        return None
    return told.fields[answers.SERVED].string_value or None


def failure_of(message: ProcessingRequest) -> InstanceError | None:
    """What went wrong with the instance, where it is not the instance that answers."""
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


def misconfigured(what: str) -> Refusal:
    """The data plane does not send what the picker needs."""
    _log.error("the data plane's ext_proc filter is misconfigured: %s", what)
    return Refusal(500, "misconfigured_data_plane", f"ext_proc: {what}.", kind="server_error")
