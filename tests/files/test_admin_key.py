"""The files with the keys that gateways make: who finds them, and what is not believed."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from hetero_gateway.files.admin_key import FoundKey, find, forget, keep

KEY = "0123456789abcdef" * 4
URL = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The runtime directory, and the temporary one."""
    runtime, temporary = tmp_path / "runtime", tmp_path / "temporary"
    runtime.mkdir(0o700)
    temporary.mkdir(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return runtime, temporary


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("has_runtime_directory", [True, False])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_key_is_its_users_alone_from_the_first_moment(
    has_runtime_directory: bool,
    umask: int,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, temporary = folders
    expected = runtime / "hetero-gateway"
    if not has_runtime_directory:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        expected = temporary / f"hetero-gateway-keys-{os.geteuid()}"
    before = os.umask(umask)
    try:
        path = keep(KEY, URL)
    finally:
        os.umask(before)
    assert path.parent == expected
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert find(URL) == FoundKey(KEY, URL)
    forget(KEY)
    assert find(URL) is None
    assert not list(runtime.iterdir()) + list(temporary.iterdir())


@pytest.mark.parametrize(
    ("at", "asked", "address"),
    [
        (URL, f"{URL}/", f"{URL}/"),
        (URL, "http://localhost:8000", URL),
        (URL, "http://LOCALHOST:8000/x", f"{URL}/x"),
        (URL, "https://127.0.0.1:8000", "https://127.0.0.1:8000"),
        ("http://[::1]:8000", "http://[::1]:8000", "http://[::1]:8000"),
        ("http://[::1]:8000", "http://[0:0:0:0:0:0:0:1]:8000", "http://[::1]:8000"),
        ("http://[::1]:8000", "http://localhost:8000", "http://[::1]:8000"),
        ("http://127.0.0.1:80", "http://localhost", "http://127.0.0.1:80"),
        ("https://127.0.0.1:443", "https://127.0.0.1", "https://127.0.0.1:443"),
    ],
)
def test_it_is_found_by_what_means_its_gateway_and_sent_to_its_very_address(
    at: str, asked: str, address: str
) -> None:
    """Who else listens on another address that is called localhost does not get it."""
    keep(KEY, at)
    assert find(asked) == FoundKey(KEY, address)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8001",
        "http://127.0.0.2:8000",
        "http://[::1]:8000",
        "http://10.0.0.1:8000",
        "http://gateway.example:8000",
        "http://localhost.example:8000",
        "http://127.0.0.1.example:8000",
        "http://2130706433:8000",
        "ftp://127.0.0.1",
        "127.0.0.1:8000",
        "http://127.0.0.1:x",
        "http://[::1",
        "",
    ],
)
def test_no_other_place_is_sent_it(url: str) -> None:
    keep(KEY, URL)
    assert find(url) is None


def test_one_at_an_address_that_is_not_loopback_is_never_found() -> None:
    keep(KEY, "http://10.0.0.1:8000")
    assert find("http://10.0.0.1:8000") is None


@pytest.mark.parametrize("wrong", [0o644, 0o640, 0o660, 0o602, 0o400])
def test_a_file_that_others_could_read_or_write_is_not_believed(wrong: int) -> None:
    keep(KEY, URL).chmod(wrong)
    assert find(URL) is None


@pytest.mark.parametrize("wrong", [0o755, 0o701, 0o770, 0o1777])
def test_a_directory_that_others_could_enter_is_not_used(
    wrong: int, folders: tuple[Path, Path]
) -> None:
    _, temporary = folders
    first = keep(KEY, URL)
    first.parent.chmod(wrong)
    assert find(URL) is None
    # A new key goes elsewhere.
    assert keep("another", URL).is_relative_to(temporary)
    assert find(URL) == FoundKey("another", URL)
    assert first.read_text("ascii").strip() == KEY
    for each in temporary.iterdir():
        each.chmod(0o777)
    with pytest.raises(PermissionError, match="not this user's alone"):
        keep(KEY, URL)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_what_belongs_to_somebody_else_is_neither_read_nor_used(
    folders: tuple[Path, Path],
) -> None:
    runtime, _ = folders
    path = keep(KEY, URL)
    os.chown(path, 12345, -1)
    assert find(URL) is None
    os.chown(path, os.geteuid(), -1)
    assert find(URL) is not None
    os.chown(path.parent, 12345, -1)
    assert find(URL) is None
    assert not keep(KEY, URL).is_relative_to(runtime)


def test_no_link_is_followed(folders: tuple[Path, Path], tmp_path: Path) -> None:
    runtime, temporary = folders
    path = keep(KEY, URL)
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    assert find(URL) is None
    # A new one takes the link's place, and leaves alone what that led to.
    keep("another", URL)
    assert not path.is_symlink()
    assert moved.read_text("ascii").strip() == KEY
    forget("another")
    (tmp_path / "theirs").mkdir(0o700)
    (runtime / "hetero-gateway").symlink_to(tmp_path / "theirs")
    assert keep(KEY, URL).is_relative_to(temporary)
    assert not list((tmp_path / "theirs").iterdir())


@pytest.mark.parametrize("content", ["", "\n", "a b", "a\nb", "é", "\0", "x" * 10**6])
def test_what_is_no_key_is_not_sent(content: str) -> None:
    path = keep(KEY, URL)
    path.write_text(content, "utf-8")
    found = find(URL)
    assert found is None or len(found.key) <= 256


def test_a_pipe_in_its_place_keeps_nobody_waiting() -> None:
    path = keep(KEY, URL)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert find(URL) is None


def test_a_new_start_overwrites_and_an_old_one_that_ends_leaves_it() -> None:
    keep("the-first", URL)
    keep("the-second", URL)
    keep("the-first", "http://127.0.0.1:9000")
    forget("the-first")
    assert find(URL) == FoundKey("the-second", URL)
    assert find("http://127.0.0.1:9000") is None


def test_the_latest_counts_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service has no XDG_RUNTIME_DIR, and the shell of its user has one."""
    old = keep("the-first", URL)
    os.utime(old, (1, 1))
    with monkeypatch.context() as service:
        service.delenv("XDG_RUNTIME_DIR")
        keep("the-second", URL)
    assert find(URL) == FoundKey("the-second", URL)


def test_a_relative_runtime_directory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "runtime")
    assert keep(KEY, URL).is_absolute()
