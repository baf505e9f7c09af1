"""The messages between two gateways of one user during a takeover, on a Unix socket.

Frames are those of ``scaleout/workers/messages``. The successor connects twice: the process that
will hold the clients' sockets asks for them (its supervisor, if it has workers), and the one that
schedules asks for the state.

    the new one             the old one
    Claim, of the sockets   Sockets, with descriptors: a pipe with the gateway's secret, and the
                            listening sockets; or Denied
    Accepting                 Yours: it takes no more connections, and ends its requests; or Denied
    Claim, of the state     Accounts, KnownInstances, KnownLengths, KnownPrefixes of each instance,
                            AllKnown; or Denied
    Loads, Accounts         Loads, Accounts, while both have requests
                            KnownInstances once more, Yours
    closes                  Bye: its requests have ended

Until ``Accepting`` the old one continues as if nothing had happened, whatever becomes of the new
one. Nothing here is pickled: a message that does not fit these types ends the connection. They
contain no key of a client, of /admin or of an instance, and no text of a request. Times are of the
monotonic clock, which all processes of a machine share, in seconds.
"""

from typing import Any

import msgspec

from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.instances.learnt import Learnt
from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import ModelCard

# Raised whenever one side would not understand the other.
PROTOCOL = 1
# The successor's messages are small; the predecessor may know millions of prompts' beginnings.
MOST_ASKED_BYTES, MOST_TOLD_BYTES = 1 << 24, 1 << 30

_Amounts = tuple[int, int, int, int]


class _Record(msgspec.Struct, array_like=True, gc=False):
    pass


class Claim(_Record, tag=1):
    """``wants``: "sockets" or "state". ``listen``: HOST:PORT that it will serve at."""

    protocol: int
    version: str
    wants: str
    listen: str


class Accepting(_Record, tag=2):
    """It accepts connections."""


class Sockets(_Record, tag=3):
    """``kinds``: of the descriptors after the secret's: "clients" or "admin"."""

    kinds: list[str]


class Denied(_Record, tag=4):
    reason: str


class Yours(_Record, tag=5):
    pass


class Bye(_Record, tag=6):
    pass


class Loads(_Record, tag=7):
    """One gateway's load on instances, if it has changed; None: nothing."""

    loads: list[tuple[InstanceId, PeerLoad | None]]


class AccountNow(_Record):
    """A client's or a group's account; ``requests``, ``tokens``: a ``Window``'s slots."""

    name: str
    second: int
    requests: list[int]
    tokens: list[int]
    in_flight: int


class Accounts(_Record, tag=8):
    """The accounts that have changed. ``usage``: of the old one, the increase by day, client and
    model since the last message.
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
    """What was learnt about lengths, by ``core/lengths``; and responses, as in workers' ``Known``.

    ``prefixes``: identifies the secret that keys of prompts begin with, without revealing it.
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
    """The state is complete."""


FromNew: Any = Claim | Accepting | Loads | Accounts
Known: Any = KnownInstances | KnownLengths | KnownPrefixes | AllKnown
FromOld: Any = Sockets | Denied | Yours | Bye | Loads | Accounts | Known
