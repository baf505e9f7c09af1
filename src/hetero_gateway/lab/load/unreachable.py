"""Why a URL does not answer, and what to do about it."""

import errno
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

# OpenSSL's errors for bytes that are not TLS.
_PLAIN = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")


def why_unreachable(url: str, error: BaseException) -> str:
    """One line.

    Args:
        url: as it was given.
        error: of httpx, or of the system; its causes are examined too.
    """
    causes = list(_causes(error))
    tls = urlsplit(url).scheme == "https"
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not trusted ({cause.verify_message}): name its authority's by "
                "--ca-file FILE, or by SSL_CERT_FILE in the environment"
            )
    text = " ".join(str(cause) for cause in causes)
    if tls and any(each in text for each in _PLAIN):
        return f"it speaks plain HTTP there: write {url.replace('https:', 'http:', 1)}"
    if any(getattr(cause, "errno", None) == errno.ECONNREFUSED for cause in causes):
        return "nobody listens there: is it started, and is this its port?"
    said = str(error) or type(error).__name__
    if not tls and type(error).__name__ in ("RemoteProtocolError", "ReadError"):
        return f"{said}. If it speaks TLS there, write {url.replace('http:', 'https:', 1)}"
    return said


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]
            if isinstance(each, BaseExceptionGroup):
                waiting += each.exceptions
