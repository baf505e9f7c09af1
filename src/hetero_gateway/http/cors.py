"""CORS: which web pages a browser lets use the gateway. Off unless origins are configured.

Cookies are never used, so credentials in the sense of CORS are not allowed; keys are fields that a
page sends itself. CORS fields of an engine are dropped.
"""

import re

from hetero_gateway.files.server_config import CorsConfig
from hetero_gateway.http.headers import Headers

METHODS = b"GET, HEAD, POST, DELETE"
_EXPOSED = (
    b"x-request-id, x-hetero-gateway-instance, x-hetero-gateway-fallback, retry-after, "
    b"x-should-retry, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, "
    b"x-ratelimit-reset-tokens"
)
# Names of fields, as a page asks for them: its libraries have many of their own.
_FIELD_NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z, -]{1,2048}")
_VARY = (b"vary", b"origin")


class Cors:
    """The allowed origins, and the fields of their answers."""

    def __init__(self, config: CorsConfig) -> None:
        self._origins = frozenset(origin.encode() for origin in config.origins)
        self._any = b"*" in self._origins
        self._max_age = b"%d" % config.max_age_s

    def headers(self, sent: Headers) -> Headers:
        """Additional fields of the answer to a request with these fields."""
        origin = _field(sent, b"origin")
        if origin is None or not self.allows(origin):
            return [] if self._any else [_VARY]
        allowed = (b"access-control-allow-origin", b"*" if self._any else origin)
        exposed = (b"access-control-expose-headers", _EXPOSED)
        return [allowed, exposed] if self._any else [allowed, exposed, _VARY]

    def preflight(self, sent: Headers) -> Headers | None:
        """The fields that answer a preflight request; None: it is none, or not allowed."""
        origin, method = _field(sent, b"origin"), _field(sent, b"access-control-request-method")
        if origin is None or method is None or not self.allows(origin):
            return None
        answer = self.headers(sent)
        answer += [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", self._max_age),
        ]
        wanted = _field(sent, b"access-control-request-headers")
        if wanted is not None and _FIELD_NAMES.fullmatch(wanted):
            answer.append((b"access-control-allow-headers", wanted))
        return answer

    def allows(self, origin: bytes) -> bool:
        """Whether pages of an origin may use the gateway."""
        return self._any or origin.lower() in self._origins


def cors_of(config: CorsConfig) -> Cors | None:
    """The configured CORS; None: no page is allowed."""
    return Cors(config) if config.origins else None


def _field(headers: Headers, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)
