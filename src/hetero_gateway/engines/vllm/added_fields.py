"""A body with the gateway's additions, otherwise byte for byte."""

from hetero_gateway.errors import Refusal

_SPACE = b" \t\r\n"


def with_last_field(body: bytes | bytearray, field: bytes) -> bytes:
    """A usable body with one more field, at its end: of equal names the last one counts.

    Raises:
        Refusal: 400 for a body that no field can be added to.
    """
    body = body.rstrip(_SPACE)
    if not body.endswith(b"}") or b"\0" in body[:4]:
        raise Refusal(400, "invalid_json", "The request body must be a JSON object in UTF-8.")
    comma = b"" if body[:-1].rstrip(_SPACE) == b"{" else b","
    return b"".join((memoryview(body)[:-1], comma, field, b"}"))
