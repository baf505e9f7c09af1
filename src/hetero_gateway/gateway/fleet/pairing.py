"""Which instances can hand prompts over to which: configures the scheduler's pairs."""

from __future__ import annotations

import math
import time
from pathlib import Path

from hetero_gateway.core.instances.pairs import KV_BYTES_PER_TOKEN, Link, Pairs
from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.kv_transfer_config import InstanceTransferConfig, can_hand_over
from hetero_gateway.files.pairs_file import MeasuredPairs, PairRow, read_pairs
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.settings import Prepared

# A link without configured speed, until transfers have been seen: slow rather than fast.
_START_S, _GBIT_PER_S = 0.01, 10.0

# Of each instance: its id, its address, and how it hands over.
_Told = list[tuple[InstanceId, str, InstanceTransferConfig | None]]


class Pairing:
    """Keeps the scheduler's pairs up to date, with what was learnt of each.

    Args:
        fleet: reports its changes from now on.
        base_dir: what the file of ``scheduler.pairs_file`` is relative to.
    """

    def __init__(self, fleet: Fleet, base_dir: Path) -> None:
        self._fleet = fleet
        self._base_dir = base_dir
        self._file: Path | None = None
        self._measured = MeasuredPairs()
        self._told: _Told = []
        self._mode = "never"
        fleet.on_pairs = self._review

    @property
    def splits(self) -> bool:
        """Whether requests may be split."""
        return self._mode != "never"

    @property
    def by_roles(self) -> bool:
        """Whether only by the roles that are found (``serve/autoscaling/roles``)."""
        return self._mode == "roles"

    def prepare(self, fresh: GatewayConfig) -> Prepared:
        """Prepare a configuration."""
        mode = fresh.scheduler.split_requests if fresh.server.workers == 1 else "never"
        file = fresh.scheduler.pairs_file
        measured = MeasuredPairs() if file is None else read_pairs(self._base_dir / file)

        def apply() -> None:
            if mode != self._mode or measured != self._measured:
                self._mode, self._told = mode, []
                self._file, self._measured = file, measured
                self._fleet.scheduler.legs.set_roles(None, Pairs(KV_BYTES_PER_TOKEN, {}))
                self._review()

        changed = file == self._file and measured != self._measured
        return Prepared(apply, ["scheduler.pairs_file"] if changed else [])

    def _review(self) -> None:
        if not self.splits:
            return
        told = [
            (each.id, each.config.base_url, each.config.kv_transfer)
            for each in self._fleet.instances.values()
        ]
        if told == self._told:
            return
        self._told = told
        legs = self._fleet.scheduler.legs
        roles = legs.roles if self.by_roles else {}
        links, now_s = _links(told, legs.pairs, self._measured), time.monotonic()
        pairs = Pairs(KV_BYTES_PER_TOKEN, links)
        for pair, for_s in legs.refused(now_s).items():
            if pair in links:
                pairs.refuse(*pair, now_s, for_s)
        legs.set_roles(roles, pairs, legs.models if self.by_roles else None)


def _links(
    told: _Told, before: Pairs | None, measured: MeasuredPairs
) -> dict[tuple[InstanceId, InstanceId], Link]:
    """Links by pair; what was learnt stays."""
    links = {}
    for one, here, mine in told:
        if mine is None:
            continue
        for other, there, theirs in told:
            if other == one or theirs is None or not can_hand_over(mine, theirs):
                continue
            row = measured.of((one, here), (other, there))
            if row is not None and row.refused:
                continue
            known = None if before is None else before.link(one, other, math.inf)
            links[one, other] = known or _link_as(row) or _link(mine, theirs)
    return links


def _link_as(row: PairRow | None) -> Link | None:
    if row is None or row.start_s is None or row.tokens_per_s is None:
        return None
    return Link(row.start_s, row.tokens_per_s * KV_BYTES_PER_TOKEN)


def _link(prefill: InstanceTransferConfig, decode: InstanceTransferConfig) -> Link:
    starts = [s for s in (prefill.start_s, decode.start_s) if s is not None]
    speeds = [g for g in (prefill.gbit_per_s, decode.gbit_per_s) if g is not None]
    # Sizes are stated in bytes of an 8B model; other models have fewer or more.
    sizes = [b for b in (prefill.kv_bytes_per_token, decode.kv_bytes_per_token) if b is not None]
    scale = KV_BYTES_PER_TOKEN / max(sizes, default=KV_BYTES_PER_TOKEN)
    bytes_per_s = min(speeds, default=_GBIT_PER_S) * 1e9 / 8 * scale
    return Link(max(starts, default=_START_S), bytes_per_s)
