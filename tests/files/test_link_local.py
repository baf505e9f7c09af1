"""Addresses that no instance should have, however they are spelt."""

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.link_local import is_link_local
from hetero_gateway.files.yaml_file import parse_model

REFUSED = [
    "169.254.169.254",
    "169.254.0.1",
    "2852039166",
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "169.254.43518",
    "[fe80::1]",
    "[fe80::1%25eth0]",
    "[::ffff:169.254.169.254]",
    "[fd00:ec2::254]",
    "100.100.100.200",
    "168.63.129.16",
    "metadata.google.internal",
    "Metadata.Google.Internal.",
]


def config(host: str, **server: object) -> GatewayConfig:
    instance = {"id": "a", "base_url": f"http://{host}:80"}
    data = {"server": server, "instances": [instance]}
    return parse_model(GatewayConfig, data, "gateway.yaml")


@pytest.mark.parametrize("host", REFUSED)
def test_they_are_refused_unless_they_are_allowed(host: str) -> None:
    assert is_link_local(host)
    with pytest.raises(ConfigError, match="link_local_instances") as caught:
        config(host)
    assert "\n" not in str(caught.value)
    config(host, link_local_instances=True)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.1.2.3", "192.168.1.1", "[::1]", "[fd12::1]", "gpu-7", "169.1.2.3"]
)
def test_others_are_not(host: str) -> None:
    assert not is_link_local(host)
    config(host)
