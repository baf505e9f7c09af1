"""The key of /admin that a gateway creates at its start, and the file in which commands find it.

A gateway on loopback whose configuration gives /admin neither a key (``server.admin_key_env``) nor
a listener (``server.admin_listen``) creates a key at each start. So that commands of the same user
on the same machine need no flag, the key is in a file while the gateway runs:

    where    $XDG_RUNTIME_DIR/hetero-gateway, or if that is unavailable hetero-gateway-keys-UID in
             the temporary directory; of mode 0700
    name     the address and the port that the gateway listens on
    mode     0600

A key is sent only to the address that its file is named after. Either the gateway that created the
key listens there, or no gateway accepts that key any more; so a file left behind by a killed
process reveals nothing.
"""

import contextlib
import hmac
import ipaddress
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from hetero_gateway.files.server_config import ServerConfig

_MOST_BYTES = 256
_PORTS = {"http": 80, "https": 443}
_LOCALHOST = ("127.0.0.1", "::1")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class FoundKey(NamedTuple):
    """A key, and the URL of its gateway: by address, since a name may also lead elsewhere."""

    key: str
    url: str


def is_loopback(host: str) -> bool:
    """Whether an address or host name (without port) means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def made_admin_key(server: "ServerConfig", shared: str | None) -> str | None:
    """A key of 256 bits; None if the configuration controls access to /admin otherwise.

    Args:
        shared: a secret of all processes of one gateway, which then derive the same key; None:
            there is one process.
    """
    named = server.admin_key_env is not None or server.admin_listen is not None
    if named or not is_loopback(server.host):
        return None
    if shared is None:
        return secrets.token_hex(32)
    return hmac.digest(shared.encode(), b"the key of /admin", "sha256").hex()


def keep(key: str, url: str) -> Path:
    """Write a key where commands look for that of the gateway at ``url``; returns the file.

    Raises:
        OSError: no directory belongs to this user alone, or the file cannot be written.
    """
    host, port = _place(url)
    problem = OSError("there is no directory for it")
    # Twice: a gateway that ends at this moment removes an empty directory.
    for directory in private_directories() * 2:
        try:
            return _write(directory, f"{host}-{port}", key)
        except OSError as error:
            problem = error
    raise problem


def forget(key: str) -> None:
    """Remove the files that hold this key."""
    for directory in private_directories():
        with contextlib.suppress(OSError):
            with opened_private(directory) as folder:
                for name in os.listdir(folder):
                    if (found := _read(folder, name)) is not None and found[1] == key:
                        os.unlink(name, dir_fd=folder)
            directory.rmdir()  # if it was the last one


def find(url: str) -> FoundKey | None:
    """The key created by the gateway at a loopback URL, if it is this user's and runs here."""
    try:
        host, port = _place(url)
    except ValueError:
        return None
    for address in _LOCALHOST if host == "localhost" else (host,):
        if is_loopback(address) and (key := _newest(f"{address}-{port}")) is not None:
            netloc = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            return FoundKey(key, urlsplit(url)._replace(netloc=netloc).geturl())
    return None


def _place(url: str) -> tuple[str, int]:
    """(host, port) of a URL. Raises ValueError."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
    if port is None:
        raise ValueError(f"{url} has no port")
    if host != "localhost":
        host = str(ipaddress.ip_address(host))
    return host, port


def private_directories() -> list[Path]:
    """Directories for this user's private files: the first usable one is used for new files."""
    temporary = Path(tempfile.gettempdir()) / f"hetero-gateway-keys-{os.geteuid()}"
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or ".")
    return [runtime / "hetero-gateway", temporary] if runtime.is_absolute() else [temporary]


@contextlib.contextmanager
def opened_private(directory: Path) -> Iterator[int]:
    """Its descriptor. Raises OSError if others may write into it, or read it."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{directory} is not this user's alone")
        yield folder
    finally:
        os.close(folder)


def _write(directory: Path, name: str, key: str) -> Path:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(0o700)
    with opened_private(directory) as folder:
        made = f".{name}.{secrets.token_hex(8)}"
        handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder)
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                os.fchmod(handle, 0o600)  # regardless of the umask
                file.write(f"{key}\n")
            os.rename(made, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(made, dir_fd=folder)
            raise
    return directory / name


def _newest(name: str) -> str | None:
    """The key in the files of this name: starts may differ in having XDG_RUNTIME_DIR."""
    found = []
    for directory in private_directories():
        with contextlib.suppress(OSError), opened_private(directory) as folder:
            if (read := _read(folder, name)) is not None:
                found.append(read)
    return max(found)[1] if found else None


def _read(folder: int, name: str) -> tuple[int, str] | None:
    """(modification time, key) of a file; None if it is not a key readable by this user only."""
    try:
        # If something else has the name, opening it must not block.
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=folder)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or stat.S_IMODE(status.st_mode) != 0o600
        ):
            return None
        text = file.read(_MOST_BYTES)
    key = text.strip().decode("latin-1")
    usable = key.isascii() and key.isprintable() and " " not in key
    return (status.st_mtime_ns, key) if key and usable else None
