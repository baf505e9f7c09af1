"""The errors that the gateway itself answers with, and how they reach the client.

What an instance answers passes unchanged and is none of this.
"""

from __future__ import annotations

from hetero_gateway.core.types import Reject, RejectReason
from hetero_gateway.errors import ClientError, InstanceError
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.wire.downstream import Downstream
from hetero_gateway.gateway.wire.openai import error_body

_RETRY_AFTER_S = 2


def too_large(limit: int) -> ClientError:
    """A body above the limit, in bytes."""
    return ClientError(413, "request_too_large", f"The request body is larger than {limit} bytes.")


def rejection(reject: Reject, failure: InstanceError | None, path: str) -> ClientError:
    """The client's error for a request that no instance can take."""
    if reject.reason is RejectReason.UNKNOWN_MODEL:
        return ClientError(404, "model_not_found", reject.detail, param="model")
    if reject.reason is RejectReason.FITS_NO_INSTANCE:
        param = "prompt" if path == "/v1/completions" else "messages"
        return ClientError(400, "context_length_exceeded", reject.detail, param=param)
    if failure is not None and failure.reason != "connect":
        return ClientError(502, "upstream_error", f"{failure}", kind="server_error")
    return _unavailable("no_healthy_instance", reject.detail)


def client_error(failure: InstanceError, instance: Instance) -> ClientError:
    """The client's error for an attempt that failed and is not tried again."""
    message = f"instance {instance.id}: {failure}"
    if failure.reason.endswith("_timeout"):
        return ClientError(504, "upstream_timeout", message, kind="server_error")
    if failure.reason == "pool":
        return _unavailable("no_free_connection", message)
    if failure.reason == "connect":
        return _unavailable("no_healthy_instance", message)
    return ClientError(502, "upstream_error", message, kind="server_error")


def _unavailable(code: str, message: str) -> ClientError:
    return ClientError(503, code, message, kind="server_error", retry_after_s=_RETRY_AFTER_S)


def shutting_down() -> ClientError:
    """For what was not served before the gateway ended."""
    return _unavailable("shutting_down", "The gateway is shutting down.")


def answer(downstream: Downstream, error: ClientError, path: str, request_id: bytes) -> None:
    """Answer a request with an error; cuts a response that has begun."""
    if downstream.started:
        downstream.cut()  # a second head would be taken for a part of the body
        return
    body = error_body(error, path)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id),
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    # After a 413 the connection stays open: uvicorn discards the rest of the body. Closing with
    # unread bytes would reset it, and the client might never see the answer.
    downstream.write(downstream.start(error.status, headers, chunked=False) + body)
    downstream.finish()
