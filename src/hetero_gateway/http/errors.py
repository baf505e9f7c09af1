"""The bodies of the gateway's own errors."""

import msgspec

from hetero_gateway.errors import Refusal


def error_body(error: Refusal, path: str = "") -> bytes:
    """OpenAI's error body (Anthropic's on /v1/messages, as vLLM answers there)."""
    if path.startswith("/v1/messages"):
        return msgspec.json.encode(
            {"type": "error", "error": {"type": error.kind, "message": error.message}}
        )
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error.kind,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def sse_error_event(error: Refusal, path: str = "") -> bytes:
    """The event that ends a broken stream; no ``[DONE]`` follows."""
    prefix = b"event: error\n" if path.startswith(("/v1/messages", "/v1/responses")) else b""
    return prefix + b"data: " + error_body(error, path) + b"\n\n"
