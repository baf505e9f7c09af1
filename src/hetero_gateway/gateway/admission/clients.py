"""The client behind a request, by its key.

Today there is one key for all, so there is one client. Whatever depends on who asks (a key of
one's own, a limit, a class of priority) is decided in ``Admission.admit``, before a byte of the
body is read, and is carried by the ``Client`` from there on.
"""

from __future__ import annotations

import hmac
from typing import NamedTuple

from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.wire.headers import Headers
from hetero_gateway.gateway.wire.inbound import Inbound


class Client(NamedTuple):
    """Who asks. ``name`` is a bounded label; "" for everybody who shares the one key, or none."""

    name: str


_EVERYBODY = Client("")


class Admission:
    """Lets requests in.

    Args:
        key: that clients must send; None: open to all.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key.encode() if key else None

    @property
    def has_key(self) -> bool:
        """Whether clients' credentials are for the gateway, and none of an instance's business."""
        return self._key is not None

    def admit(self, inbound: Inbound) -> Client:
        """The client of a request whose head is here. Raises Refusal: it may not be served."""
        return self.client_of(inbound.headers)

    def client_of(self, headers: Headers) -> Client:
        """Who sent these headers. Raises Refusal: 401 unless they carry the key."""
        if self._key is None:
            return _EVERYBODY
        for name, value in headers:
            if name == b"authorization":
                value = value[7:] if value[:7].lower() == b"bearer " else b""
            elif name != b"x-api-key":
                continue
            if hmac.compare_digest(value, self._key):
                return _EVERYBODY
        raise Refusal(401, "invalid_api_key", "Incorrect or missing API key.")
