"""The gateways that a request has come through, so that none of them serves it twice.

An instance may be another gateway; it must not lead back. Each gateway has a random id, the same
for all of its processes, and adds it to a field of what it sends to instances, probes included. A
request that has been here before, or through too many gateways, is refused at once: 508, which no
gateway retries. If the request came from a client and through no gateway, the instance it came back
from is at fault; otherwise a client that writes the field itself could get instances ejected. Such
a client can only get its own request refused, and what it writes is shown nowhere.
"""

import hashlib
import logging
import math
import os
import time

from hetero_gateway.errors import Refusal
from hetero_gateway.http.headers import HOPS

LOOP_DETECTED = 508
# A gateway in front of one per region, one per cluster there, and one to spare.
MOST_HOPS = 4
_ID_BYTES = 8
_MOST_BYTES = (2 * _ID_BYTES + 2) * MOST_HOPS
_LOG_EVERY_S, _MOST_LOGGED = 60.0, 256

_log = logging.getLogger(__name__)


class Hops:
    """One gateway's hop rules.

    Args:
        secret: shared by all of its processes, and by no other gateway; None: it has only one.

    ``field``: the line for probes, and for requests that came through no other gateway.
    """

    def __init__(self, secret: str | None) -> None:
        own_id = os.urandom(_ID_BYTES)
        if secret is not None:
            own_id = hashlib.sha256(b"hops" + secret.encode()).digest()[:_ID_BYTES]
        self._own_id = own_id.hex().encode()
        self.field = b"%b: %b\r\n" % (HOPS, self._own_id)
        self._logged_s: dict[str, float] = {}

    def field_behind(self, came: bytes) -> bytes:
        """The line for a request that came through others. ``came``: accepted by ``check``."""
        return b"%b: %b, %b\r\n" % (HOPS, came, self._own_id)

    def check(self, came: bytes) -> None:
        """Raises Refusal: it was here before, or has come through too many.

        Args:
            came: the field's value, b"" without one.
        """
        if self._own_id in came:
            self._warn("a request came back to this gateway: one of its instances leads here")
            message = "The request came back to this gateway: an instance of its leads back to it."
            raise loop_detected(message)
        if came.count(b",") + 1 >= MOST_HOPS or len(came) > _MOST_BYTES:
            raise loop_detected(f"The request came through {MOST_HOPS} gateways or more.")

    def pair_behind(self, came: bytes) -> tuple[str, str]:
        """The same as name and value; ``came``: b"" for none."""
        own_id = self._own_id.decode()
        return HOPS.decode(), f"{came.decode('latin-1')}, {own_id}" if came else own_id

    def note_loop(self, instance_id: str) -> None:
        """Note an instance's answer that a request has been somewhere before."""
        self._warn(f"instance {instance_id} answered 508: it seems to lead back to a gateway")

    def _warn(self, text: str) -> None:
        """Log it now and then: there may be as many as there are requests."""
        now_s = time.monotonic()
        if now_s - self._logged_s.get(text, -math.inf) >= _LOG_EVERY_S:
            if len(self._logged_s) >= _MOST_LOGGED:
                self._logged_s.clear()
            self._logged_s[text] = now_s
            _log.warning("%s", text)


def loop_detected(message: str) -> Refusal:
    """The answer to such a request."""
    # Another try would be in vain: the configuration is wrong.
    return Refusal(LOOP_DETECTED, "loop_detected", message, kind="server_error", spent=True)
