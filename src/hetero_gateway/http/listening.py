"""A listening address: its form in a URL, and why it cannot be used."""

import errno
import socket


def url_host(host: str) -> str:
    """An address as written in a URL."""
    return f"[{host}]" if ":" in host else host


def cannot_listen(host: str, port: int, error: OSError, by: str = "--port or server.port") -> str:
    """Why an address cannot be listened on, and what helps; ``by``: the setting of the port."""
    known = {
        errno.EADDRINUSE: f"the port is taken (by whom: ss -ltnp 'sport = :{port}'); "
        f"give another one by {by}",
        errno.EADDRNOTAVAIL: "this machine has no such address; 0.0.0.0 is all that it has",
        errno.EACCES: "ports below 1024 are the administrator's; take a higher one",
        errno.EMFILE: "the process may open no more files (ulimit -n)",
    }
    if isinstance(error, socket.gaierror):
        reason = "no such host name is known here"
    else:
        # asyncio's text names the address; its number may combine several errors.
        reason = known.get(error.errno or 0) or error.strerror or str(error)
    return f"cannot listen on {url_host(host)}:{port}: {reason}"
