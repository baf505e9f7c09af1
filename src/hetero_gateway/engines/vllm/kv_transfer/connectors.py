"""vLLM's KV connectors, and what their two requests carry.

    kv_connector             order       prefill request       decode request
    NixlConnector, ...Pull   in turn     do_remote_decode      the prefill answer's, unchanged
    NixlPushConnector        in turn     the same              the same, its transfer_mode push
    MooncakeConnector        at once     the transfer's id     that id, and where the prefill is
    shared stores            in turn     nothing               nothing

NIXL's pull was observed (vLLM 0.32, nixl 1.5.1); the others follow vLLM's source.

An engine trusts these objects: without ``remote_port``, or with fewer blocks than the prompt needs,
it crashes, with all its streams. So an incomplete one is never handed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from hetero_gateway.engines.vllm.kv_transfer.answers import NoHandover, PrefillAnswer

# vLLM's ``kv_lease_duration``: how long blocks are pinned that nobody fetches. Afterwards they may
# be reused, and whoever then fetches them gets another prompt's without an error.
DEFAULT_LEASE_S = 30.0
# How long a decode request may take to reach its engine, which then renews the lease itself.
_LEAST_LEFT_S = 5.0
_MOST_PARAMETERS_BYTES = 1 << 20
_MOST_ENGINES = 4096
# The base URL, without a path, of Mooncake's bootstrap server.
_BOOTSTRAP = re.compile(r"http://[!-~]{1,512}")

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Block = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class Transfer(NamedTuple):
    """What is known about a pair of requests before the first one goes.

    Args:
        id: of this transfer, new for each: 1 to 128 visible ASCII characters.
        block_tokens: of the prefill instance's cache (``CacheFacts``); None: not known.
        bootstrap: Mooncake's, of the prefill instance: ``http://HOST:PORT``.
        engine_id: Mooncake's, of the prefill instance: ``mooncake_engine_ids`` reads it.
    """

    id: str = ""
    block_tokens: int | None = None
    bootstrap: str = ""
    engine_id: str = ""


class Connector:
    """One way to hand over.

    Args:
        name: as in ``--kv-transfer-config``'s ``kv_connector``.
    """

    at_once = False
    # Whether instances need each other's address, so that not all with this connector can pair.
    pairs = True

    def __init__(self, name: str) -> None:
        self.name = name

    def for_prefill(self, transfer: Transfer) -> bytes:
        """``kv_transfer_params`` of the prefill request as JSON; b"": none."""
        raise NotImplementedError

    def for_decode(self, transfer: Transfer, answer: PrefillAnswer | None) -> bytes:
        """``kv_transfer_params`` of the decode request as JSON; b"": none.

        Args:
            answer: of the prefill instance; None with ``at_once``.

        Raises:
            NoHandover: the answer has nothing to hand to a decode instance.
        """
        raise NotImplementedError


class _Nixl(msgspec.Struct):
    do_remote_prefill: bool
    remote_block_ids: list[list[_Block] | _Block]
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    do_remote_decode: bool = False
    tp_size: _Size = 1
    dcp_size: _Size = 1
    remote_num_tokens: _Count | None = None
    transfer_mode: str | None = None
    remote_prefill_cached_tokens: _Count | None = None


_nixl = msgspec.json.Decoder(_Nixl).decode


class NixlConnector(Connector):
    """``mode``: whether the decode instance reads, or the prefill instance writes."""

    def __init__(self, name: str, mode: str) -> None:
        super().__init__(name)
        self.mode = mode

    def for_prefill(self, transfer: Transfer) -> bytes:
        return (
            b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
            b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
        )

    def for_decode(self, transfer: Transfer, answer: PrefillAnswer | None) -> bytes:
        given = _given(answer)
        try:
            read = _nixl(given)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise NoHandover(f"its kv_transfer_params are not whole: {error}") from None
        assert answer is not None
        if not read.do_remote_prefill or read.do_remote_decode:
            raise NoHandover("its kv_transfer_params are not for a decode instance")
        if read.transfer_mode not in (None, self.mode):
            raise NoHandover(f"its transfer mode is {read.transfer_mode!r}, not {self.mode!r}")
        self._check_blocks(read, transfer, answer)
        return given

    def _check_blocks(self, read: _Nixl, transfer: Transfer, answer: PrefillAnswer) -> None:
        """Raises NoHandover: there are fewer blocks than the prompt has.

        Sliding-window layers omit the blocks at the front, so the longest group counts.
        Until vLLM 0.12 there was one group, with no list around it.
        """
        groups = [[block] if isinstance(block, int) else block for block in read.remote_block_ids]
        flat = any(isinstance(block, int) for block in read.remote_block_ids)
        blocks = len(groups) if flat else max(map(len, groups), default=0)
        tokens = max(read.remote_num_tokens or 0, answer.prompt_tokens or 0)
        if not blocks or not tokens:
            raise NoHandover("it hands over no blocks")
        if read.remote_num_tokens is not None and read.remote_num_tokens < tokens:
            raise NoHandover(f"it hands over {read.remote_num_tokens} of {tokens} prompt tokens")
        # A block id is shared by all ranks of a context-parallel group, each of which has a part of
        # it.
        each = (transfer.block_tokens or 0) * read.dcp_size
        if each and blocks * each < tokens:
            raise NoHandover(f"it hands over {blocks} blocks of {each} for {tokens} prompt tokens")


class SharedStore(Connector):
    """A store that all instances read: what one has put there, others find by its hash."""

    pairs = False

    def for_prefill(self, transfer: Transfer) -> bytes:
        return b""

    def for_decode(self, transfer: Transfer, answer: PrefillAnswer | None) -> bytes:
        return b""


class MooncakeConnector(Connector):
    """Both requests name one transfer; the decode instance asks the other for it."""

    at_once = True

    def for_prefill(self, transfer: Transfer) -> bytes:
        asked = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": _transfer_id(transfer),
        }
        return msgspec.json.encode(asked)

    def for_decode(self, transfer: Transfer, answer: PrefillAnswer | None) -> bytes:
        if not transfer.engine_id or not _BOOTSTRAP.fullmatch(transfer.bootstrap):
            raise NoHandover("it is not known where the prefill instance's engine is")
        asked = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": _transfer_id(transfer),
            "remote_bootstrap_addr": transfer.bootstrap,
            "remote_engine_id": transfer.engine_id,
        }
        return msgspec.json.encode(asked)


def _transfer_id(transfer: Transfer) -> str:
    if not re.fullmatch(r"[!-~]{1,128}", transfer.id):
        raise ValueError(f"a transfer's id must be visible ASCII, not {transfer.id!r}")
    return transfer.id


def _given(answer: PrefillAnswer | None) -> bytes:
    if answer is None:
        raise ValueError("this connector needs the prefill instance's answer")
    given = answer.parameters
    if not given:
        # Some versions hand nothing over if the first token is the last (EOS, a stop).
        raise NoHandover("it has no kv_transfer_params", ended=answer.ended)
    if len(given) > _MOST_PARAMETERS_BYTES:
        raise NoHandover(f"its kv_transfer_params have {len(given)} bytes")
    try:
        json.loads(given)  # with which the decode instance reads it, all of it
    except (ValueError, RecursionError):
        raise NoHandover("its kv_transfer_params are no JSON to an engine") from None
    return given


_SHARED = ("ExampleConnector", "LMCacheConnectorV1", "LMCacheMPConnector", "MooncakeStoreConnector")
# By vLLM's names.
CONNECTORS: Mapping[str, Connector] = {
    "NixlConnector": NixlConnector("NixlConnector", "pull"),
    "NixlPullConnector": NixlConnector("NixlPullConnector", "pull"),
    "NixlPushConnector": NixlConnector("NixlPushConnector", "push"),
    "MooncakeConnector": MooncakeConnector("MooncakeConnector"),
    **{name: SharedStore(name) for name in _SHARED},
}


def may_be_fetched(age_s: float, lease_s: float = DEFAULT_LEASE_S) -> bool:
    """Whether a decode request sent now still finds its blocks; else prefill again.

    Args:
        age_s: since the prefill instance's answer began to arrive.
    """
    return age_s < max(lease_s - _LEAST_LEFT_S, lease_s / 2)


def mooncake_engine_ids(answer: bytes) -> dict[int, str]:
    """The engine of each data-parallel rank, from a bootstrap server's ``GET /query``.

    Empty if it is not such an answer.
    """
    try:
        ranks: dict[str, dict[str, Any]] = msgspec.json.decode(
            answer, type=dict[str, dict[str, Any]]
        )
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    ids = {}
    for rank, entry in list(ranks.items())[:_MOST_ENGINES]:
        name = entry.get("engine_id")
        if rank.isascii() and rank.isdigit() and len(rank) < 6 and isinstance(name, str):
            if 0 < len(name) <= 512:
                ids[int(rank)] = name
    return ids
