"""A configuration whose instances are the gateway itself."""

import socket
from pathlib import Path

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.own_address import check_not_own
from hetero_gateway.files.server_config import ServerConfig
from tests.fakes.processes import command


def outward_address() -> str | None:
    """An address of this machine that is not loopback; None: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def refused(base_url: str, **server: object) -> bool:
    try:
        check_not_own(base_url, ServerConfig.model_validate({"port": 8000} | server))
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST.", "a.localhost", "127.1", "2130706433",
             "0x7f000001", "[::ffff:127.0.0.1]", "0.0.0.0"]
)  # fmt: skip
def test_a_loopback_address_in_any_spelling_is_the_gateways_own(host: str) -> None:
    for listening in ("127.0.0.1", "localhost", "0.0.0.0", "::"):
        assert refused(f"http://{host}:8000", host=listening)
        assert refused(f"https://{host}:8000/path", host=listening)
        assert not refused(f"http://{host}:8001", host=listening)
        assert not refused(f"http://{host}", host=listening)
        assert refused(f"http://{host}", host=listening, port=80)
        assert refused(f"https://{host}", host=listening, port=443)


def test_another_address_is_another_listener() -> None:
    assert not refused("http://127.0.0.2:8000")
    assert refused("http://127.0.0.2:8000", host="0.0.0.0")
    assert not refused("http://[::1]:8000")
    assert not refused("http://[::1]:8000", host="0.0.0.0")
    assert refused("http://[::1]:8000", host="::")
    assert refused("http://[::1]:8000", host="::1")
    for host in ("192.0.2.7", "[2001:db8::7]", "no-such-host.invalid"):
        assert not refused(f"http://{host}:8000", host="0.0.0.0")
        assert not refused(f"http://{host}:8000", host="::")
    assert not refused("http://127.0.0.1:8000", port=0)


def test_the_machines_own_address_and_name_are_its_own() -> None:
    address = outward_address()
    if address is not None:
        assert refused(f"http://{address}:8000", host="0.0.0.0")
        assert refused(f"http://{address}:8000", host=address)
        assert not refused(f"http://{address}:8000", host="127.0.0.1")
    name = socket.gethostname()
    assert refused(f"http://{name}:8000", host="0.0.0.0")
    assert refused(f"http://{name}:8000", host=name)


def test_the_listener_of_admin_is_one_of_the_gateways() -> None:
    assert refused("http://127.0.0.1:8001", admin_listen="127.0.0.1:8001")
    assert refused("http://[::1]:8001", admin_listen="[::1]:8001")
    assert not refused("http://127.0.0.1:8001", admin_listen="unix:/tmp/8001")


def test_validate_names_the_line_and_serve_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "server:\n  port: 8123\ninstances:\n- id: me\n  base_url: http://localhost:8123\n"
        "models:\n  m:\n    fallbacks:\n    - model: x\n      base_url: http://127.0.0.1:8123\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_gateway_config(path)
    assert len(raised.value.lines) == 2
    for word in ("validate", "serve"):
        done = command(word, "-c", str(path))
        assert done.returncode == 2
        assert f"{path}:5: instances.0.base_url: http://localhost:8123" in done.stderr
        assert "where this gateway listens" in done.stderr
    # On another port it is another server's.
    assert load_gateway_config(path, {"server.port": 8124})
