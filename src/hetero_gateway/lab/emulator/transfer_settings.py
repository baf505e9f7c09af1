"""How an emulated instance hands KV caches over: ``--kv-transfer-config``, and its link."""

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero_gateway.errors import ConfigError

_MODES = {"NixlConnector": "pull", "NixlPullConnector": "pull", "NixlPushConnector": "push"}


class _Extra(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    kv_lease_duration: float = Field(30.0, gt=0)
    enforce_handshake_compat: bool = True


class KVTransferConfig(BaseModel):
    """``--kv-transfer-config``, as far as it is emulated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_connector: Literal["NixlConnector", "NixlPullConnector", "NixlPushConnector"]
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_buffer_device: str = "cuda"
    engine_id: str | None = None
    kv_connector_extra_config: _Extra = _Extra()

    @property
    def mode(self) -> str:
        return _MODES[self.kv_connector]


@dataclass(frozen=True, slots=True)
class KVTransferSettings:
    """How an instance hands over.

    Args:
        config: of ``--kv-transfer-config``.
        host, port: where others fetch; port 0: a free one.
        gbit_per_s: of its link, each way.
        start_s: of a transfer, before its bytes.
        bytes_per_token: of KV; the default is Llama-3-8B's in 16 bits.
    """

    config: KVTransferConfig
    host: str = "127.0.0.1"
    port: int = 0
    gbit_per_s: float = 100.0
    start_s: float = 0.002
    bytes_per_token: int = 131_072

    def __post_init__(self) -> None:
        for name in ("gbit_per_s", "bytes_per_token"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--kv-{name.replace('_', '-')}: must be above 0")
        if not 0 <= self.start_s < math.inf:
            raise ConfigError("--kv-start-s: must be 0 or more")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--kv-port: must be 0 to 65535, not {self.port}")


def read_config(text: str) -> KVTransferConfig:
    """Parse ``--kv-transfer-config``. Raises ConfigError: in one line."""
    try:
        return KVTransferConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"] if not where else f"{where}: {first['msg']}"
        raise ConfigError(f"--kv-transfer-config: {what}") from None
