"""Where an emulated instance publishes its cache events: ``--kv-events-config``."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero_gateway.errors import ConfigError


class KVEventsConfig(BaseModel):
    """``--kv-events-config``, as far as it is emulated. Port 0: a free one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = Field("tcp://*:5557", pattern=r"^tcp://\*:[0-9]{1,5}$")
    replay_endpoint: str | None = Field(None, pattern=r"^tcp://(\*|127\.0\.0\.1):[0-9]{1,5}$")
    buffer_steps: int = Field(10_000, ge=1)
    topic: str = ""


def read_config(text: str) -> KVEventsConfig:
    """Parse ``--kv-events-config``. Raises ConfigError: in one line."""
    try:
        return KVEventsConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--kv-events-config: {where}: {first['msg']}") from None
