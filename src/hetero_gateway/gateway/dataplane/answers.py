"""The gateway's own errors, and how they reach the client.

Answers of an instance pass unchanged and are not treated here.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_gateway.core.types import Reject, RejectReason
from hetero_gateway.engines.vllm import RESPONSES
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.routes import Outside
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.http.downstream import Downstream
from hetero_gateway.http.errors import error_body
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.headers import Headers, lines_of

_RETRY_AFTER_S = 2
# OpenAI's clients retry after 408, 409, 429 and every 5xx, unless told not to.
NO_RETRY = (b"x-should-retry", b"false")


def too_large(limit: int) -> Refusal:
    """A body above the limit, in bytes."""
    return Refusal(413, "request_too_large", f"The request body is larger than {limit} bytes.")


def no_response(path: str, detail: str = "") -> Refusal:
    """Nothing is known of the response that a path names. ``detail``: why."""
    name = path.removeprefix(RESPONSES + "/").partition("/")[0]
    message = f"Response with id '{name[:256]}' not found{detail}."
    return Refusal(404, "response_not_found", message, param="response_id")


def no_previous_response() -> Refusal:
    """What a body continues is unknown, or another client's: the two are not distinguished."""
    message = "There is no response of this `previous_response_id`."
    return Refusal(404, "previous_response_not_found", message, param="previous_response_id")


def rejection(
    reject: Reject, error: InstanceError | None, path: str, *, spent: bool = False
) -> Refusal:
    """The answer if no instance can take the request; ``error``: the last attempt's.

    ``spent``: the request was tried on several.
    """
    if reject.reason is RejectReason.UNKNOWN_MODEL:
        return Refusal(404, "model_not_found", reject.detail, param="model")
    if reject.reason is RejectReason.CONTINUES_NOTHING:
        if path != RESPONSES:
            return no_response(path, ": the instance that made it is gone")
        param = "previous_response_id"
        return Refusal(404, "previous_response_not_found", reject.detail, param=param)
    if reject.reason is RejectReason.FITS_NO_INSTANCE:
        param = "prompt" if path == "/v1/completions" else "messages"
        return Refusal(400, "context_length_exceeded", reject.detail, param=param)
    if error is not None and error.failure is Failure.LOCAL:
        return _unavailable(error.failure.code, str(error))
    if error is not None and error.failure is not Failure.CONNECT:
        return Refusal(502, "upstream_error", f"{error}", kind="server_error", spent=spent)
    return _unavailable("no_healthy_instance", reject.detail)


def refusal_of(
    error: InstanceError, instance: Instance | Outside, *, spent: bool = False
) -> Refusal:
    """The answer to a request whose attempt failed and is not retried.

    ``spent``: the request was tried on several. A client that has waited for one time-out should
    not wait for another.
    """
    failure, message = error.failure, f"instance {instance.id}: {error}"
    if failure.status == 503:
        return _unavailable(failure.code, message)
    spent = spent or failure.status == 504
    return Refusal(failure.status, failure.code, message, kind="server_error", spent=spent)


def _unavailable(code: str, message: str) -> Refusal:
    return Refusal(503, code, message, kind="server_error", retry_after_s=_RETRY_AFTER_S)


def no_instance(detail: str) -> Refusal:
    """No instance can take it now."""
    return _unavailable("no_healthy_instance", detail)


def nobody_can() -> Refusal:
    """Neither an instance of the model nor any of its fallbacks takes the request."""
    return no_instance("no instance of the model, and none of its fallbacks, can take requests now")


def shutting_down() -> Refusal:
    """For requests that were not served before the gateway ended."""
    return _unavailable("shutting_down", "The gateway is shutting down.")


def whole_answer(error: Refusal, path: str, request_id: bytes) -> tuple[Headers, bytes]:
    """Header fields and body of an error."""
    body = error_body(error, path)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id),
        *error.headers,
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return headers, body


def answer(
    downstream: Downstream,
    error: Refusal,
    path: str,
    request_id: bytes,
    extra: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Answer a request with an error; cuts a response that has begun. ``extra``: header fields."""
    if downstream.gone:
        return
    if downstream.started:
        downstream.cut()  # a second head would look like part of the body
        return
    headers, body = whole_answer(error, path, request_id)
    if error.spent:
        headers.append(NO_RETRY)
    headers += extra
    # After a 413 the connection stays open: uvicorn discards the rest of the body. Closing with
    # unread bytes would reset it, and the client might never see the answer.
    downstream.write(downstream.start(error.status, lines_of(headers), chunked=False) + body)
    downstream.finish()
