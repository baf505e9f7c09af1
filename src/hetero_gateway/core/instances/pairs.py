"""Which instance can hand the KV of a prompt over to which, and how fast.

A pair is ordered: one instance computes a prompt, the other pulls its KV and answers. A transfer
takes a start-up time, and its bytes at a bandwidth; both begin as configured and are fitted to what
is observed, as a line by least squares in which older transfers count less. A pair that refused is
not used for some minutes: unequal engines refuse each other, and none says so before it is asked.

Each instance has one link each way. The share of the last seconds that its transfers took gives the
wait of the next one there, by M/D/1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from hetero_gateway.core.types import InstanceId, InstanceSpec, roles_pair

# Of an 8B model (Llama-3) in 16 bits, if not configured.
KV_BYTES_PER_TOKEN: Final = 131_072.0
REFUSED_FOR_S: Final = 300.0
# After this many more, a transfer counts half; the configured values count as this many.
_HALF_AFTER: Final = 64.0
_TOLD_COUNTS: Final = 4.0
# Configured values are kept as two transfers: of nothing, and of this many bytes.
_TOLD_BYTES: Final = 1e8
_START_BOUNDS_S = (0.0, 10.0)
_BANDWIDTH_BOUNDS = (1e5, 1e13)
# A link's transfers are forgotten over this time, and take at most this share of it.
_LINK_OVER_S: Final = 10.0
_MOST_BUSY: Final = 0.95


class Link(NamedTuple):
    """The cost of a transfer: ``start_s``, and bytes over ``bytes_per_s``."""

    start_s: float
    bytes_per_s: float

    def takes_s(self, size_bytes: float) -> float:
        return self.start_s + size_bytes / self.bytes_per_s


class _Fit:
    """A pair's link, by sums over its transfers: weight, bytes, seconds, their products."""

    __slots__ = ("_sums", "link", "refused_until_s")

    def __init__(self, told: Link) -> None:
        self.link = told
        self.refused_until_s = -math.inf
        w, x, far_s = _TOLD_COUNTS / 2, _TOLD_BYTES, told.takes_s(_TOLD_BYTES)
        self._sums = (2 * w, w * x, w * (told.start_s + far_s), w * x * x, w * x * far_s)

    def observe(self, size_bytes: float, took_s: float) -> None:
        keep = 0.5 ** (1 / _HALF_AFTER)
        x, y = size_bytes, took_s
        n, sx, sy, sxx, sxy = (keep * one for one in self._sums)
        n, sx, sy, sxx, sxy = n + 1, sx + x, sy + y, sxx + x * x, sxy + x * y
        self._sums = (n, sx, sy, sxx, sxy)
        spread = n * sxx - sx * sx
        per_byte_s = 1 / self.link.bytes_per_s
        if spread > 1e-9 * n * sxx:
            per_byte_s = (n * sxy - sx * sy) / spread
        slowest, fastest = _BANDWIDTH_BOUNDS
        per_byte_s = min(1 / slowest, max(1 / fastest, per_byte_s))
        low_s, high_s = _START_BOUNDS_S
        start_s = min(high_s, max(low_s, (sy - per_byte_s * sx) / n))
        if start_s == low_s and sx > 0:  # a line through 0
            per_byte_s = min(1 / slowest, max(1 / fastest, sy / sx))
        self.link = Link(start_s, 1 / per_byte_s)


class _Busy:
    """Seconds of recent transfers in one direction of an instance's link."""

    __slots__ = ("_at_s", "_recent_s")

    def __init__(self) -> None:
        self._recent_s = self._at_s = 0.0

    def note(self, takes_s: float, now_s: float) -> None:
        now_s = max(now_s, self._at_s)
        faded = math.exp((self._at_s - now_s) / _LINK_OVER_S)
        self._recent_s, self._at_s = self._recent_s * faded + takes_s, now_s

    def share(self, now_s: float) -> float:
        since_s = min(0.0, self._at_s - now_s)
        return min(_MOST_BUSY, self._recent_s * math.exp(since_s / _LINK_OVER_S) / _LINK_OVER_S)


class Pairs:
    """The pairs of all instances.

    Args:
        kv_bytes_per_token: of what is handed over.
        links: by (instance that computes the prompt, instance that answers), as configured; no
            other pair can hand over.
    """

    __slots__ = (
        "_fits", "_into", "_least_start_s", "_most_bytes_per_s", "_out_of", "_refused",
        "kv_bytes_per_token",
    )  # fmt: skip

    def __init__(
        self, kv_bytes_per_token: float, links: Mapping[tuple[InstanceId, InstanceId], Link]
    ) -> None:
        self.kv_bytes_per_token = kv_bytes_per_token
        self._fits = {pair: _Fit(link) for pair, link in links.items() if pair[0] != pair[1]}
        self._refused: set[tuple[InstanceId, InstanceId]] = set()
        self._out_of = {prefill: _Busy() for prefill, _ in self._fits}
        self._into = {decode: _Busy() for _, decode in self._fits}
        # Bounds that hold for every link seen so far.
        self._least_start_s, self._most_bytes_per_s = math.inf, 1.0
        for fit in self._fits.values():
            self._bound(fit.link)

    def __len__(self) -> int:
        return len(self._fits)

    def links(self) -> dict[tuple[InstanceId, InstanceId], Link]:
        """All links, as observed; those of pairs that refused as well."""
        return {pair: fit.link for pair, fit in self._fits.items()}

    def link(self, prefill: InstanceId, decode: InstanceId, now_s: float) -> Link | None:
        """The pair's link; None: they cannot hand over, or not now."""
        fit = self._fits.get((prefill, decode))
        return None if fit is None or now_s < fit.refused_until_s else fit.link

    def transfer_s(
        self, prefill: InstanceId, decode: InstanceId, tokens: float, now_s: float
    ) -> float:
        """How long a transfer of this many tokens takes, including its wait for the links; inf:
        they cannot."""
        fit = self._fits.get((prefill, decode))
        if fit is None or now_s < fit.refused_until_s:
            return math.inf
        takes_s = fit.link.takes_s(tokens * self.kv_bytes_per_token)
        out, into = self._out_of[prefill].share(now_s), self._into[decode].share(now_s)
        busy = out if out > into else into
        return takes_s * (1 + busy / (2 * (1 - busy)))

    def least_s(self, tokens: float) -> float:
        """A known lower bound of any transfer of this many tokens, s."""
        return self._least_start_s + tokens * self.kv_bytes_per_token / self._most_bytes_per_s

    def sent(self, prefill: InstanceId, decode: InstanceId, tokens: float, now_s: float) -> None:
        """Note that a transfer of this many tokens is coming. KeyError: there is no such pair."""
        takes_s = self._fits[prefill, decode].link.takes_s(tokens * self.kv_bytes_per_token)
        self._out_of[prefill].note(takes_s, now_s)
        self._into[decode].note(takes_s, now_s)

    def observe(
        self, prefill: InstanceId, decode: InstanceId, size_bytes: float, took_s: float
    ) -> None:
        """Note a transfer; absurd values are ignored. KeyError: there is no such pair."""
        if 0 <= size_bytes < math.inf and 0 <= took_s < math.inf:
            fit = self._fits[prefill, decode]
            fit.observe(size_bytes, took_s)
            self._bound(fit.link)

    def _bound(self, link: Link) -> None:
        self._least_start_s = min(self._least_start_s, link.start_s)
        self._most_bytes_per_s = max(self._most_bytes_per_s, link.bytes_per_s)

    def refuse(
        self,
        prefill: InstanceId,
        decode: InstanceId,
        now_s: float,
        for_s: float = REFUSED_FOR_S,
    ) -> None:
        """Do not use the pair for some minutes. KeyError: there is no such pair."""
        self._fits[prefill, decode].refused_until_s = now_s + for_s
        self._refused.add((prefill, decode))

    def refused(self, now_s: float) -> dict[tuple[InstanceId, InstanceId], float]:
        """Pairs that are not used now, and for how long, s."""
        left_s = {pair: self._fits[pair].refused_until_s - now_s for pair in self._refused}
        found = {pair: left_s[pair] for pair in sorted(left_s) if left_s[pair] > 0}
        self._refused = set(found)
        return found


def between(specs: Iterable[InstanceSpec], link: Link, kv_bytes_per_token: float) -> Pairs:
    """All pairs of these that share a model, if their roles allow it."""
    every = tuple(specs)
    return Pairs(
        kv_bytes_per_token,
        {
            (one.instance_id, other.instance_id): link
            for one in every
            for other in every
            if one is not other
            and roles_pair(one.kv_role, other.kv_role)
            and one.models & other.models
        },
    )
