"""``instances`` and ``models`` of the gateway's configuration: which names are served by whom."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.files.kv_transfer_config import InstanceTransferConfig
from hetero_gateway.files.link_local import is_link_local
from hetero_gateway.files.model_names import ModelName, ServedNames
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.server_config import check_certificate
from hetero_gateway.files.yaml_file import StrictModel

_LONGEST_URL = 2048
# Characters that are safe in a header and in a metric's label.
_INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LONGEST_ID = 63
# The part that the id of a place has in addition to its instance's.
_PLACE = re.compile(r"\.dp\d{1,3}(?:\.\d+)?$")
MOST_RANKS = 256


def _check_base_url(value: str) -> str:
    if len(value) > _LONGEST_URL:
        raise ValueError(f"must have at most {_LONGEST_URL} characters")
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://HOST[:PORT] or https://HOST[:PORT]")
    if parts.username or parts.password:
        raise ValueError("must not carry a user name or password; use api_key_env")
    if parts.query or parts.fragment:
        raise ValueError("must not carry a query or a fragment")
    # urlsplit silently drops line breaks; a request's head must not contain one.
    if any(not "!" <= character <= "~" for character in value):
        raise ValueError("must not contain spaces, control or non-ASCII characters")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError("must not end in /v1: the paths that clients ask for are appended")
    if parts.port == 0:
        raise ValueError("must not have port 0")
    return value.rstrip("/")


def check_ranks(config: Any) -> Any:
    """For configurations that may have ranks: raises ValueError if it cannot."""
    one = config.data_parallel_ranks == 1 and getattr(config, "data_parallel_rank", None) is None
    if not one and config.kv_transfer is not None:
        # With several ranks, the engine would have to be told which one has computed a prompt.
        raise ValueError("data_parallel_ranks: not with kv_transfer: leave out one of them")
    return config


class InstanceConfig(StrictModel):
    """One running vLLM server."""

    id: str
    """Unique name: letters, digits, dot, dash, underscore; at most 63."""
    base_url: Annotated[str, AfterValidator(_check_base_url)]
    """Where it listens, without /v1."""
    model: ServedNames = None
    """Name or names it serves; default: those of its /v1/models."""
    profile: str | None = None
    """Built-in profile name, or a profile file; absent: unprofiled."""
    weight: float = Field(1.0, ge=1e-3, le=1e3)
    """For weighted-round-robin, and for unprofiled instances; 0.001 to 1000."""
    api_key_env: str | None = None
    """Environment variable with the key for this instance."""
    ca_file: Path | None = None
    """CA certificates for https; default: the system's."""
    certificate_file: Path | None = None
    """Certificate chain (PEM) that the gateway shows to this instance."""
    key_file: Path | None = None
    """The certificate's private key (PEM)."""
    kv_transfer: InstanceTransferConfig | None = None
    """How it hands KV caches over; none: it does not."""
    data_parallel_ranks: int = Field(1, ge=1, le=MOST_RANKS)
    """Engines behind its address; each is a place of its own, `ID.dp0`, `ID.dp1`, …"""
    data_parallel_start_rank: int = Field(0, ge=0, le=65535)
    """The first one's number in `X-data-parallel-rank`."""
    data_parallel_rank: int | None = Field(None, ge=0, lt=MOST_RANKS)
    """For a place: its index among those behind its address, from 0."""

    _certified = model_validator(mode="after")(check_certificate)

    @field_validator("id")
    @classmethod
    def _check_id(cls, value: str) -> str:
        if not _INSTANCE_ID.fullmatch(value):
            raise ValueError(
                "must be 1 to 63 letters, digits, dots, dashes or underscores, starting with a "
                "letter or digit"
            )
        return value

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.data_parallel_ranks > 1:
            if self.data_parallel_rank is not None:
                raise ValueError("data_parallel_ranks and data_parallel_rank: one of them")
            if len(self.id) + len(f".dp{self.data_parallel_ranks - 1}") > _LONGEST_ID:
                raise ValueError("id: too long for one with data_parallel_ranks")
        check_ranks(self)
        return self

    def places(self) -> list["InstanceConfig"]:
        """Its units for the scheduler: itself, or a place for each of its ranks."""
        if self.data_parallel_ranks == 1:
            return [self]
        return [
            self.model_copy(
                update={
                    "id": f"{self.id}.dp{rank}",
                    "data_parallel_ranks": 1,
                    "data_parallel_rank": rank,
                }
            )
            for rank in range(self.data_parallel_ranks)
        ]

    @property
    def server(self) -> str:
        """For a place, the instance that it is a part of; else its own id."""
        return self.id if self.data_parallel_rank is None else _PLACE.sub("", self.id)

    @property
    def rank_header(self) -> int | None:
        """The header value that selects this place; None: none is needed."""
        rank = self.data_parallel_rank
        return None if rank is None else self.data_parallel_start_rank + rank

    @property
    def models(self) -> frozenset[str]:
        if self.model is None:
            return frozenset()
        return frozenset([self.model] if isinstance(self.model, str) else self.model)


class FallbackConfig(StrictModel):
    """Who answers if no instance of a model can: another model here, or another service."""

    model: ModelName
    """Its name there; the body's `model` is rewritten."""
    base_url: Annotated[str, AfterValidator(_check_base_url)] | None = None
    """An OpenAI-compatible service elsewhere, without /v1; none: here."""
    api_key_env: str | None = None
    """Environment variable with the key for this service."""
    ca_file: Path | None = None
    """CA certificates for https; default: the system's."""

    @model_validator(mode="after")
    def _check_elsewhere(self) -> Self:
        if self.base_url is None and (self.api_key_env or self.ca_file):
            raise ValueError("api_key_env and ca_file are for a base_url")
        return self


class ModelConfig(StrictModel):
    """The handling of requests for a name."""

    serve: ModelName | None = None
    """The model that it stands for; the body's `model` is rewritten."""
    split: dict[ModelName, Annotated[float, Field(gt=0, le=1e6)]] = Field(
        default_factory=dict, max_length=16
    )
    """Several models, each with its weight."""
    split_by: Literal["request", "client"] = "request"
    """How one is chosen: by a hash of the request's id, or of the client's key."""
    fallbacks: list[FallbackConfig] = Field(default_factory=list, max_length=8)
    """Alternatives, tried in order if no instance can answer."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.serve is not None and self.split:
            raise ValueError("serve and split: one of them")
        return self


def check_reachable(base_url: str) -> None:
    """Raises ValueError: no instance may have this address or name."""
    host = urlsplit(base_url).hostname or ""
    if is_link_local(host):
        raise ValueError(
            f"base_url: {host} is link-local or a cloud's metadata service; allow such addresses "
            "with server.link_local_instances"
        )


def instance_profile(instance: InstanceConfig, base_dir: Path) -> Profile | None:
    """The profile that an instance names, or None when it names none."""
    return None if instance.profile is None else load_profile(instance.profile, base_dir)
