"""The /admin key that a gateway created at its start: who can read it, and for how long."""

import logging
from typing import TextIO

from hetero_gateway.files.admin_key import forget, keep

_log = logging.getLogger(__name__)


class MadeKey:
    """Other commands of this user find the key from the announcement until ``close``.

    Args:
        key: None: the gateway created none.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._is_kept = False

    def close(self) -> None:
        """The gateway has ended; if a takeover failed, the earlier gateway still has the key."""
        if self._key is not None and self._is_kept:
            forget(self._key)

    def leave(self) -> None:
        """The next gateway has the same key."""
        self._is_kept = False

    def dashboard(self, url: str, stream: TextIO) -> str:
        """The dashboard of a gateway that now serves at ``url``, as printed on ``stream``."""
        if self._key is None:
            return f"{url}/dashboard"
        try:
            keep(self._key, url)
            self._is_kept = True
        except OSError as error:
            _log.warning(
                "the admin key cannot be stored (%s), and commands here will not find it: "
                "set server.admin_key_env", error,
            )  # fmt: skip
        return dashboard_link(url, self._key, stream)


def dashboard_address(url: str, key: str) -> str:
    """With the key after "#": browsers do not send that part of an address."""
    return f"{url.rstrip('/')}/dashboard#key={key}"


def dashboard_link(url: str, key: str, stream: TextIO) -> str:
    """The dashboard's address for ``stream``: with the key only on a terminal.

    Anything else may be a log that others read.
    """
    if stream.isatty():
        return dashboard_address(url, key)
    return f"{url}/dashboard (its key: hetero-gateway key admin {url})"
