"""Keeps clients' prefix caches apart: each credential has its own hashes and cache salt.

A fast answer reveals that its prompt's beginning was cached, and so what another client asked. With
``scheduler.isolate_clients`` the gateway adds ``cache_salt`` to what is sent to an engine, which
then finds only what was cached under the same salt; and keys of prompts begin with another number
for each client, so that no request is sent where only others' prompts are cached.

A client is identified by its credentials: the whole of ``authorization`` and ``x-api-key``. Clients
that send nothing share. A client's own salt keeps its meaning: it becomes part of the one sent.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

from hetero_gateway.core.request import namespace
from hetero_gateway.engines.vllm.added_fields import with_last_field
from hetero_gateway.gateway.request.forms import is_form
from hetero_gateway.http.heads import Inbound


class Tenants:
    """Distinguishes clients. ``secret``: without it, nobody can compute their salts or hashes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = hashlib.sha256(secret).digest()

    def seed(self, inbound: Inbound, seed: int) -> int:
        """The start of the keys of a client's prompts."""
        return namespace(seed, self._digest(inbound, b""))

    def salted(self, inbound: Inbound, own_salt: bytes) -> bytes:
        """The body with a ``cache_salt`` as its last field: of equal names the last one counts.

        Args:
            own_salt: the client's, b"" without one.

        Raises:
            Refusal: 400 for a body that no field can be added to.
        """
        if is_form(inbound.path, inbound.content_type):
            return inbound.body  # of speech, which has no such field and no such cache
        salt = base64.urlsafe_b64encode(self._digest(inbound, own_salt)).rstrip(b"=")
        return with_last_field(inbound.body, b'"cache_salt":"%b"' % salt)

    def _digest(self, inbound: Inbound, own_salt: bytes) -> bytes:
        credentials = [v for k, v in inbound.headers if k in (b"authorization", b"x-api-key")]
        who = hmac.digest(self._secret, b"\n".join(credentials), "sha256")
        return hmac.digest(who, own_salt, "sha256")
