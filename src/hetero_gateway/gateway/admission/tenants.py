"""Clients that share no prefix cache: each credential has hashes and a cache salt of its own.

An answer that comes fast shows that its prompt's beginning was cached, and so what somebody else
asked. With ``scheduler.isolate_clients`` the gateway adds ``cache_salt`` to what is sent to an
engine, which then finds only what was cached under the same salt; and keys of prompts begin with
another number for each client, so that nobody is sent where only others' prompts are.

A client is recognised by what it authenticates with: the whole of ``authorization`` and
``x-api-key``. Those who send nothing share. A salt that a client gives keeps its
meaning: it becomes part of the one that is sent.
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
    """Distinguishes clients. ``secret``: without it, nobody can make a salt or a hash of theirs."""

    def __init__(self, secret: bytes) -> None:
        self._secret = hashlib.sha256(secret).digest()

    def seed(self, inbound: Inbound, seed: int) -> int:
        """What the keys of a client's prompts begin with."""
        return namespace(seed, self._digest(inbound, b""))

    def salted(self, inbound: Inbound, own_salt: bytes) -> bytes:
        """The body with a ``cache_salt``, which is its last field: of equal names that one counts.

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
