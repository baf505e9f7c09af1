"""Aliases, splits of a name over models, and fallbacks if no instance can serve.

    name asked for   ``models.NAME`` of the configuration says
    ---------------  ---------------------------------------------------------------------------
    an alias         ``serve``: the model that instances serve
    a split          ``split``: one of several models, by weight; the same one for the same
                     request's id, or for the same client's key
    any              ``fallbacks``: in turn, if nothing can take the request: no instance is
                     there, the queue is full or too slow, or all attempts failed before the
                     first byte

A client's key must allow the name that was asked for, and each fallback's. A request that continues
a response has no fallback. Only the ``model`` of a body is rewritten.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import urlsplit

from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.instance_config import FallbackConfig, ModelConfig
from hetero_gateway.files.secrets import secret
from hetero_gateway.http.headers import Headers
from hetero_gateway.http.heads import Inbound
from hetero_gateway.http.tls import ClientContexts, ClientTls
from hetero_gateway.http.upstream import InstancePool

_CREDENTIALS = (b"authorization", b"x-api-key")
_HASH_BYTES = 8


class Outside:
    """A service elsewhere: not one of our instances, neither scheduled nor probed.

    Attributes:
        id: its name in headers, logs and metrics.
    """

    __slots__ = ("api_key", "id", "leave_at_s", "pool", "silent")

    def __init__(self, pool: InstancePool, api_key: str | None) -> None:
        self.id = InstanceId(f"outside:{pool.host}")
        self.silent = False  # it is not watched
        self.leave_at_s = math.inf
        self.pool = pool
        self.api_key = api_key

    def __repr__(self) -> str:
        return f"<Outside {self.pool!r}>"


class OutsidePlace(NamedTuple):
    """A request's place at a service elsewhere. ``label``: of its fallback."""

    instance: Outside
    label: str
    waited_s: float = 0.0


class Fallback(NamedTuple):
    """A fallback if no instance can serve.

    Args:
        label: its name for a client's key, the answer's header and metrics.
        model: its name there.
        outside: where that is; None: here.
    """

    label: str
    model: str
    outside: Outside | None


class _Route(NamedTuple):
    targets: tuple[tuple[float, str], ...]  # (sum of the weights up to it, model)
    by_client: bool
    fallbacks: tuple[Fallback, ...]


class ModelRoutes:
    """The routes of requests, by the name that they ask for.

    ``by_name``: the names with a route.

    Args:
        config: of the gateway.
        contexts: for TLS towards services elsewhere.

    Raises:
        ConfigError: a key or a certificate is missing.
    """

    def __init__(self, config: GatewayConfig, contexts: ClientContexts) -> None:
        self.by_name = {
            name: _Route(
                _targets(each),
                each.split_by == "client",
                tuple(_fallback(config, name, f, contexts) for f in each.fallbacks),
            )
            for name, each in config.models.items()
        }

    def target(self, name: str | None, inbound: Inbound) -> str | None:
        """The model that a name stands for; None: itself."""
        route = self.by_name.get(name or "")
        if route is None or not route.targets:
            return None
        targets = route.targets
        if len(targets) == 1:
            return targets[0][1]
        text = _credentials(inbound.headers) if route.by_client else inbound.request_id
        digest = blake2b(text, digest_size=_HASH_BYTES, key=b"split").digest()
        drawn = int.from_bytes(digest, "little") / 256**_HASH_BYTES * targets[-1][0]
        return next((model for upto, model in targets if drawn < upto), targets[-1][1])

    def next_fallback(
        self, name: str, seen: int, models: Collection[str] | None, path: str
    ) -> tuple[int, Fallback] | None:
        """The next fallback for a name if no instance can take a request; None: none.

        Args:
            seen: how many were examined before.
            models: that the client may use; None: all.
            path: the request's: a service elsewhere only gets OpenAI's own.

        Returns:
            How many have been examined now, and the fallback.
        """
        route = self.by_name.get(name)
        fallbacks = () if route is None else route.fallbacks
        for number, fallback in enumerate(fallbacks[seen:], seen + 1):
            allowed = models is None or fallback.label in models
            if allowed and (fallback.outside is None or path.startswith("/v1/")):
                return number, fallback
        return None

    def aliases(self, served: Callable[[str], bool]) -> Iterable[tuple[str, str]]:
        """Aliases of which some models are served, and the first of these."""
        for name, route in self.by_name.items():
            for _, model in route.targets:
                if served(model):
                    yield name, model
                    break

    def close(self) -> None:
        """Close the connections elsewhere, each when its exchange has ended."""
        for route in self.by_name.values():
            for fallback in route.fallbacks:
                if fallback.outside is not None:
                    fallback.outside.pool.close()


def _targets(config: ModelConfig) -> tuple[tuple[float, str], ...]:
    if config.serve is not None:
        return ((1.0, config.serve),)
    sums = itertools.accumulate(config.split.values())
    return tuple(zip(sums, config.split, strict=True))


def _fallback(
    gateway: GatewayConfig, name: str, config: FallbackConfig, contexts: ClientContexts
) -> Fallback:
    if config.base_url is None:
        return Fallback(config.model, config.model, None)
    key = secret(config.api_key_env, f"models.{name}.fallbacks: api_key_env")
    context = None
    if config.base_url.startswith("https:"):
        context = contexts.context(ClientTls(config.ca_file, None, None))
    pool = InstancePool(config.base_url, gateway.pool, gateway.timeouts.connect_s, context)
    pool.allows_link_local = gateway.server.link_local_instances
    host = urlsplit(config.base_url).hostname
    return Fallback(f"{host}/{config.model}", config.model, Outside(pool, key))


def _credentials(headers: Headers) -> bytes:
    return b"\n".join(value for name, value in headers if name in _CREDENTIALS)
