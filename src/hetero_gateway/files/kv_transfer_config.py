"""``kv_transfer`` of an instance: to whom it can hand over a prompt's KV cache, and how fast."""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from hetero_gateway.core.types import KvRole, roles_pair
from hetero_gateway.engines.vllm.kv_transfer import CONNECTORS, DEFAULT_LEASE_S
from hetero_gateway.files.setup_warnings import SetupWarning
from hetero_gateway.files.yaml_file import StrictModel

_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _check_connector(value: str) -> str:
    if value not in CONNECTORS:
        raise ValueError(f"must be one of {', '.join(CONNECTORS)}")
    return value


def _check_group(value: str) -> str:
    if not _GROUP.fullmatch(value):
        raise ValueError(
            "must be 1 to 63 letters, digits, dots, dashes or underscores, starting with a letter "
            "or digit"
        )
    return value


def _check_bootstrap(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme != "http" or not parts.hostname or parts.port is None or parts.path:
        raise ValueError("must be http://HOST:PORT")
    if any(not "!" <= character <= "~" for character in value) or "@" in value or parts.query:
        raise ValueError("must be http://HOST:PORT")
    return value


class InstanceTransferConfig(StrictModel):
    """How an instance hands KV caches over."""

    connector: Annotated[str, AfterValidator(_check_connector)]
    """`kv_connector` of its `--kv-transfer-config`."""
    group: Annotated[str, AfterValidator(_check_group)] = "default"
    """Instances of one group and connector can hand over to each other."""
    role: KvRole = "both"
    """Its part for others: both; `prefill`: only compute prompts for them; `decode`: only answer
        prompts that they have computed."""
    lease_s: float = Field(DEFAULT_LEASE_S, gt=0, le=3600)
    """How long it keeps blocks that nobody fetches (`kv_lease_duration`)."""
    gbit_per_s: float | None = Field(None, gt=0, le=1e5)
    """Of its link, until transfers have been seen; none: not known."""
    start_s: float | None = Field(None, ge=0, le=60)
    """Of a transfer, before its bytes; none: not known."""
    kv_bytes_per_token: float | None = Field(None, ge=1, le=1e9)
    """Of its model; none: an 8B model's."""
    bootstrap_url: Annotated[str, AfterValidator(_check_bootstrap)] | None = None
    """MooncakeConnector: where others ask for it; none: port 8998 of its host."""

    @model_validator(mode="after")
    def _check_bootstrap_is_asked(self) -> Self:
        if self.bootstrap_url is not None and not CONNECTORS[self.connector].at_once:
            raise ValueError(f"bootstrap_url: {self.connector} asks nobody for it")
        return self


def can_hand_over(
    prefill: InstanceTransferConfig | None, decode: InstanceTransferConfig | None
) -> bool:
    """Whether, by the configuration, the first may compute prompts that the second answers."""
    if prefill is None or decode is None:
        return False
    same = (prefill.connector, prefill.group) == (decode.connector, decode.group)
    return same and roles_pair(prefill.role, decode.role)


def hand_over_to(
    id: str, instances: Iterable[tuple[str, InstanceTransferConfig | None]]
) -> list[str]:
    """The instances that one can hand over to, in order."""
    every = dict(instances)
    return [other for other in every if other != id and can_hand_over(every[id], every[other])]


def transfer_warnings(
    instances: Sequence[tuple[str, InstanceTransferConfig | None]],
    *,
    picks: bool,
    splits: bool = False,
    workers: int = 1,
    prefill_header: str | None = None,
) -> list[SetupWarning]:
    """Settings that are allowed but probably mistakes.

    Args:
        picks: the configuration is also for the picker.
        splits: requests are to be split.
        workers: of the gateway.
        prefill_header: of the picker.
    """
    warnings = []
    if splits and workers > 1:
        text = "scheduler.split_requests: with several workers every request is served whole"
        warnings.append(SetupWarning(text))
    transferring = [(id, config) for id, config in instances if config is not None]
    for id, config in transferring:
        others = [other for other in transferring if other[0] != id]
        paired = any(
            can_hand_over(config, other) or can_hand_over(other, config) for _, other in others
        )
        if not paired:
            text = f"kv_transfer: nobody else of group {config.group!r} can pair with it"
            warnings.append(SetupWarning(text, id, "kv_transfer"))
    if picks and transferring and prefill_header is None:
        text = (
            "picker: Envoy sends a request once, so the picker uses no kv_transfer: whom it picks "
            "computes the prompt and answers it (picker.prefill_header, where each instance has "
            "llm-d's sidecar)"
        )
        warnings.append(SetupWarning(text))
    elif picks and prefill_header is not None:
        text = (
            f"picker.prefill_header: Envoy sends a request once; of {prefill_header} llm-d's "
            "sidecar alone makes two, so each instance's base_url has to be its sidecar's"
        )
        if not (splits and transferring):
            text = (
                "picker.prefill_header: no request is split without scheduler.split_requests and "
                "kv_transfer of instances"
            )
        warnings.append(SetupWarning(text))
    return warnings
