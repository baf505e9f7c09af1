"""What two gateways of one user say while the later one takes over, on a Unix socket.

Frames as those of ``scaleout/workers/messages``. The one that is to take over connects twice: who
holds the clients' sockets is to have them (its supervisor, where it has workers), and who schedules
is to know what is known.

    the new one             the old one
    Claim, of the sockets   Sockets, with descriptors: a pipe that the gateway's secret is in, and
                            the listening sockets; or Denied
    Accepting                 Yours: it takes no more connections, and ends its requests; or Denied
    Claim, of the state     Accounts, KnownInstances, KnownLengths, KnownPrefixes of each instance,
                            AllKnown; or Denied
    Loads, Accounts         Loads, Accounts, while both have requests
                            KnownInstances once more, Yours
    closes                  Bye: its requests are over

Until ``Accepting`` the old one goes on as if nothing had been, whatever becomes of the new one.
Nothing here is pickled: what does not fit these types ends the connection. No key of a client, of
/admin or of an instance is in them, and no text of a request. Times are of the monotonic clock,
which all processes of a machine share, in seconds.
"""

from typing import Any

import msgspec

from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.instances.learnt import Learnt
from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import ModelCard

# Rises whenever one side would not understand the other.
PROTOCOL = 1
# What the later one says is small; the earlier one may know of millions of beginnings of prompts.
MOST_ASKED_BYTES, MOST_TOLD_BYTES = 1 << 24, 1 << 30

_Amounts = tuple[int, int, int, int]


class _Record(msgspec.Struct, array_like=True, gc=False):
    pass


class Claim(_Record, tag=1):
    """``wants``: "sockets" or "state". ``listen``: HOST:PORT that it is to serve at."""

    protocol: int
    version: str
    wants: str
    listen: str


class Accepting(_Record, tag=2):
    """It accepts connections."""


class Sockets(_Record, tag=3):
    """``kinds``: of the descriptors behind the secret's: "clients" or "admin"."""

    kinds: list[str]


class Denied(_Record, tag=4):
    reason: str


class Yours(_Record, tag=5):
    pass


class Bye(_Record, tag=6):
    pass


class Loads(_Record, tag=7):
    """What one has on instances, where that has changed; None: nothing."""

    loads: list[tuple[InstanceId, PeerLoad | None]]


class AccountNow(_Record):
    """A client's or a group's account; ``requests``, ``tokens``: a ``Window``'s slots."""

    name: str
    second: int
    requests: list[int]
    tokens: list[int]
    in_flight: int


class Accounts(_Record, tag=8):
    """Those that have changed. ``usage``: of the old one, by day, client and model, what came to it
    since it was last said.
    """

    accounts: list[AccountNow]
    usage: list[tuple[int, str, str, _Amounts]]


class HandedInstance(_Record):
    """An instance. ``config``: its configuration as JSON. The rest is ``fleet.Instance``'s."""

    config: bytes
    source: str
    source_key: str
    up: bool
    down_reason: str
    draining: bool
    leave_at_s: float
    weight: float
    asleep: bool
    paused: bool
    wakeable: bool
    models: list[str]
    cards: dict[str, ModelCard]
    adapters: list[str]
    max_model_len: int | None
    kv_capacity_tokens: int | None
    prefix_caching: bool | None
    started_s: float | None
    outcomes: tuple[str, float, str, int, float]
    learnt: Learnt


class KnownInstances(_Record, tag=9):
    instances: list[HandedInstance]


class KnownLengths(_Record, tag=10):
    """What was learnt of lengths, by ``core/lengths``; and of responses, as workers' ``Known``.

    ``prefixes``: names the secret that keys of prompts begin with, without giving it away.
    ``lately``: ``PrefixCaches.lately``; None: there are none.
    """

    prefixes: str
    finished: list[tuple[str, float]]
    reports: list[tuple[str, int, int]]
    means: list[tuple[str, str, int, int, float, float]]
    responses: list[tuple[bytes, InstanceId, int, str, str]]
    lately: tuple[float, float, float] | None


class KnownPrefixes(_Record, tag=11):
    """Keys of an instance, least recently used first, and their sizes, of 8 bytes each.

    ``trust``: ``Trust.sums``.
    """

    instance: InstanceId
    keys: bytes
    sizes: bytes
    trust: tuple[float, float]


class AllKnown(_Record, tag=12):
    """That was all."""


FromNew: Any = Claim | Accepting | Loads | Accounts
Known: Any = KnownInstances | KnownLengths | KnownPrefixes | AllKnown
FromOld: Any = Sockets | Denied | Yours | Bye | Loads | Accounts | Known
