"""The configuration's section ``discovery``: sources of instances besides the file."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from hetero_gateway.files.instance_config import MOST_RANKS, check_ranks
from hetero_gateway.files.kv_transfer_config import InstanceTransferConfig
from hetero_gateway.files.model_names import ModelName, ServedNames
from hetero_gateway.files.server_config import check_certificate
from hetero_gateway.files.yaml_file import StrictModel

# Which fields a kind of source has besides the common ones; the first ones are required.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "file": (("file",), ()),
    "dns": (("host",), ("record", "port", "nameserver")),
    "kubernetes": (("selector",), ("resource", "namespace", "port", "api_url")),
}


class ProfileRule(StrictModel):
    """The profile of instances that have these labels and serve this model."""

    profile: str
    """A built-in profile's name, or a profile file."""
    labels: dict[str, str] = Field(default_factory=dict)
    """All of them must be among the instance's."""
    model: ModelName | None = None
    """The model that the engine serves."""


class SourceConfig(StrictModel):
    """One source of instances. An instance that it has named is not removed by other sources."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,23}$")
    """Unique name: 1 to 24 letters, digits and dashes."""
    kind: Literal["file", "dns", "kubernetes"]
    """The kind of source."""
    file: Path | None = None
    """file: YAML with a list `instances`."""
    host: str | None = None
    """dns: the name to look up."""
    record: Literal["address", "srv"] = "address"
    """dns: A and AAAA records, or SRV records with their ports."""
    nameserver: str | None = None
    """dns: IP address, or IP:PORT, of the server to ask; none: the system's."""
    selector: str | None = None
    """kubernetes: label selector."""
    resource: Literal["pods", "endpointslices"] = "pods"
    """kubernetes: what is selected."""
    namespace: str | None = None
    """kubernetes: none: the gateway's own."""
    api_url: str | None = None
    """kubernetes: the API server; none: the cluster's own."""
    port: int | None = Field(None, ge=1, le=65535)
    """Of instances whose record names no port; none: 8000."""
    scheme: Literal["http", "https"] = "http"
    """Of the instances' base_url."""
    interval_s: float = Field(30.0, ge=0.1, le=3600)
    """dns: the longest time between two look-ups; file: between two looks; kubernetes: between two
    full lists."""
    model: ServedNames = None
    """As of an instance."""
    profile: str | None = None
    """If no rule matches; none: unprofiled."""
    profiles: list[ProfileRule] = Field(default_factory=list)
    """The first matching rule gives the profile."""
    weight: float = Field(1.0, ge=1e-3, le=1e3)
    """As of an instance."""
    api_key_env: str | None = None
    """As of an instance."""
    ca_file: Path | None = None
    """As of an instance."""
    certificate_file: Path | None = None
    """As of an instance."""
    key_file: Path | None = None
    """As of an instance."""
    kv_transfer: InstanceTransferConfig | None = None
    """As of an instance."""
    data_parallel_ranks: int = Field(1, ge=1, le=MOST_RANKS)
    """As of an instance."""
    data_parallel_start_rank: int = Field(0, ge=0, le=65535)
    """As of an instance."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        needed, possible = _FIELDS[self.kind]
        for field in needed:
            if getattr(self, field) is None:
                raise ValueError(f"{field}: kind {self.kind} needs it")
        of_others = {f for fields in _FIELDS.values() for group in fields for f in group}
        for field in sorted(of_others - {*needed, *possible}):
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field}: kind {self.kind} has none")
        return self

    _certified = model_validator(mode="after")(check_certificate)
    _ranked = model_validator(mode="after")(check_ranks)
