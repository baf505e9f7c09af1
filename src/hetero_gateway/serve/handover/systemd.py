"""Messages to systemd, and its sockets: sd_notify(3) and sd_listen_fds(3)."""

import contextlib
import os
import socket

_FIRST = 3  # descriptor


def tell_ready() -> None:
    """Tell systemd that this process serves, and is the main one; also for a successor."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        message = f"READY=1\nMAINPID={os.getpid()}"
        told.sendto(message.encode(), address.replace("@", "\0", 1))


def given_sockets() -> list[socket.socket]:
    """The sockets that systemd listens on for this process."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = int(os.environ.pop("LISTEN_FDS", "0"))
    del os.environ["LISTEN_PID"]
    given = [socket.socket(fileno=_FIRST + i) for i in range(count)]
    for each in given:
        os.set_inheritable(each.fileno(), False)
        each.setblocking(False)
    return given
