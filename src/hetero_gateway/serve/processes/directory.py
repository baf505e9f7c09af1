"""The directory of a gateway's Unix sockets: in the system's temporary one, for one user alone.

It goes when the gateway does: the supervisor removes it; if that was killed, its processes do as
they end; if all were killed at once, the next gateway that is started.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from hetero_gateway.errors import HeteroGatewayError

_PREFIX, _LOCK = "hetero-gateway-", "lock"


class SocketDirectory:
    """A new one, held by this process until ``remove``.

    Raises HeteroGatewayError: there is no room for it.
    """

    def __init__(self) -> None:
        path = None
        try:
            parent = Path(tempfile.gettempdir())
            _remove_abandoned(parent)
            path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            self._lock = _held(Path(path))
        except OSError as error:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            raise HeteroGatewayError(
                "no directory for sockets can be made in the temporary one (TMPDIR): "
                f"{error.strerror}"
            ) from error
        self.path = path

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _held(path: Path) -> int:
    """A lock in a directory, as a descriptor."""
    made = path / "new-lock"
    lock = os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # It has its name once it is held: no other gateway finds it free.
    made.rename(made.with_name(_LOCK))
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Those of this user whose supervisors are gone."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            seen = path.lstat()
            if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid():
                continue
            # One without a lock is being made at this moment.
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its supervisor lives
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
