"""The resources that all connections of a server share: places, turns, memory and time.

Places: a data plane has a connection for each of its threads, and idle ones hold a place all the
same. So a newcomer is admitted as long as another connection is idle: the least valuable one is
closed. Places are also shared between addresses: a crowd at one address pushes out only its own.

Turns: a connection reads its data until its time slice is over. The rest waits, and so does
everything of a connection that has recently used more than its share: of all that wait, one reads
for one slice in each turn of the event loop, those that have used little first. In between, sockets
are polled, and connections that ask for little are served at once, as long as all of them together
take no more than TURN_S of a turn.
"""

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Protocol

from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.scaleout.picker.http2.blocks import PathsByBlock

# A data plane has a connection for each of its threads and each 1024 calls.
MAX_CONNECTIONS = 1024
# Of one address: the rest is for the others.
MAX_PER_ADDRESS = 512
# The owner of an IPv6 network has all addresses in it.
_NETWORK_BITS = 64
# One connection's reading in a turn of the event loop: some ten requests, and a hundredth of the
# 0.1 s for which no peer may delay another.
SLICE_S = 0.001
# CPU that a connection may use before it waits for its turn, and how much it earns per second: one
# that asks for less than half of the loop never waits.
BURST_S = 0.01
SHARE = 0.5
# Of a turn of the event loop, for all connections that read at once while others wait.
TURN_S = 0.005
# How many light users among the waiting get a turn for each heavy one.
_FAVOUR = 4
# Interval of looking for late calls, and how many calls are checked in one go (1 ms).
TICK_S = 1.0
_LOOKED_AT_ONCE = 4096
_LOG_EVERY_S = 10.0

_log = logging.getLogger(__name__)


class Occupant:
    """A connection, or the beginning of one.

    Attributes:
        address: of its peer, as ``address_of`` returns it.
        at_work: whether it was doing something that must not be cut short, at the last look.
        heard: a message has come since that tick.
        has_spoken: one came before.
        spoke_tick: the server's tick of its last message, or of its creation.
    """

    address = ""
    at_work = False
    heard = False
    has_spoken = False
    spoke_tick: int

    def works(self) -> bool:
        """Update whether it is at work."""
        return False

    def make_room(self) -> None:
        """Close now."""
        raise NotImplementedError

    def drain(self) -> None:
        """Take nothing new, and close when the open calls are done."""
        self.make_room()

    def close(self) -> None:
        """Close, whatever is open."""
        self.make_room()

    def look(self, tick: int) -> int:
        """Once in a tick: handle late calls. Returns how many calls were checked."""
        return 0


def address_of(transport: asyncio.BaseTransport) -> str:
    """The address that identifies a peer."""
    peer = transport.get_extra_info("peername")
    return network_of(peer[0]) if peer else ""


def network_of(host: str) -> str:
    """An IPv4 address, or the network of an IPv6 one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> _NETWORK_BITS << _NETWORK_BITS, 64)))


class Register:
    """The places of one server, in order of arrival."""

    def __init__(self) -> None:
        self._members: dict[Occupant, None] = {}
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Occupant]:
        return iter(self._members)

    def add(self, member: Occupant) -> bool:
        """Whether there is room for one more, or room was made."""
        count = self._by_address[member.address]
        if count >= MAX_PER_ADDRESS:
            least = self._least(member.address)
        elif len(self._members) >= MAX_CONNECTIONS:
            crowd, most = self._by_address.most_common(1)[0]
            least = (self._least(crowd) if most > count + 1 else None) or self._least()
        else:
            self._put(member)
            return True
        if least is None:
            return False
        self.discard(least)
        self._put(member)
        least.make_room()
        return True

    def _least(self, address: str | None = None) -> Occupant | None:
        """The least valuable one, of all or of an address; None: all are at work."""
        while True:
            idle = (
                each
                for each in self._members
                if not each.at_work and (address is None or each.address == address)
            )
            least = min(idle, key=_worth, default=None)
            if least is None or not least.works():
                return least

    def replace(self, member: Occupant, by: Occupant) -> bool:
        """Give its place to another one, if it still has that."""
        if member not in self._members:
            return False
        self.discard(member)
        self._put(by)
        return True

    def discard(self, member: Occupant) -> None:
        if member in self._members:
            del self._members[member]
            self._by_address[member.address] -= 1
            if not self._by_address[member.address]:
                del self._by_address[member.address]

    def _put(self, member: Occupant) -> None:
        self._members[member] = None
        self._by_address[member.address] += 1


def _worth(member: Occupant) -> tuple[bool, bool, int]:
    """Sort key: those that have sent messages stay longest; of equals the oldest goes."""
    return member.heard or member.has_spoken, member.heard, member.spoke_tick


class InLine(Protocol):
    def read_on(self) -> None: ...


class Turns:
    """The connections of one server with more data than they may read at once.

    Attributes:
        spent_s: time spent reading in this turn of the event loop.
    """

    def __init__(self) -> None:
        self._fresh: deque[InLine] = deque()
        self._others: deque[InLine] = deque()
        self._favoured = 0
        self._last: InLine | None = None
        self._due = False
        self.spent_s = 0.0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._others)

    @property
    def is_full(self) -> bool:
        """Whether a connection has to wait, however little it has used."""
        return self._due and self.spent_s >= TURN_S

    def take(self, connection: InLine) -> bool:
        """Whether one that has used its share may read at once, as nobody else wants to."""
        if self._due:
            return False
        if connection is not self._last:
            # The next one that comes in this turn waits.
            self._last = connection
            self._call()
        return True

    def forget(self, connection: InLine) -> None:
        """It is closed. It may stay in line: it has nothing to read."""
        if connection is self._last:
            self._last = None

    def add(self, connection: InLine, *, is_fresh: bool) -> None:
        """Let it continue reading when its turn comes, once. ``is_fresh``: it has used little."""
        (self._fresh if is_fresh else self._others).append(connection)
        self._call()

    def _call(self) -> None:
        if not self._due:
            self._due = True
            self.spent_s = 0.0
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._due = False
        if self._fresh and (not self._others or self._favoured < _FAVOUR):
            self._favoured += 1
            first = self._fresh.popleft()
        elif self._others:
            self._favoured = 0
            first = self._others.popleft()
        else:
            return
        if self._fresh or self._others:
            self._call()
        first.read_on()


class Commons:
    """Knows all connections of a server, and the limits of each.

    Args:
        limits: the budget of long messages.
        margin_bytes: how much longer than a body a message may be.
        on_bug: called if a receiver failed.
    """

    def __init__(self, limits: BodyLimits, margin_bytes: int, on_bug: Callable[[], None]) -> None:
        self.limits = limits
        self.margin_bytes = margin_bytes
        self.on_bug = on_bug
        self.known_blocks: PathsByBlock = {}
        self.open_calls = 0
        self.held_bytes = 0  # besides long messages
        self.turns = Turns()
        self.register = Register()
        self.tick: int = 0  # seconds, while there are connections
        self._ticking: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # a call or a connection has ended
        self._logged_s = -_LOG_EVERY_S

    # Called by connections

    def add(self, connection: Occupant, handshake: Occupant | None = None) -> bool:
        """Whether there may be one more, or it may take its handshake's place."""
        if handshake is not None:
            return self.register.replace(handshake, connection)
        if not self.register.add(connection):
            self.warn("a data plane's connection is refused: there are as many as there may be")
            return False
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._look)
        return True

    def discard(self, connection: Occupant) -> None:
        self.register.discard(connection)
        self._changed.set()

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Run something that a connection has to wait for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look(self) -> None:
        self.tick += 1
        self._look_at(list(self.register))

    def _look_at(self, connections: list[Occupant]) -> None:
        """Let connections look for late calls, some in each turn of the event loop."""
        loop, looked_at = asyncio.get_running_loop(), 0
        while connections and looked_at < _LOOKED_AT_ONCE:
            looked_at += 1 + connections.pop().look(self.tick)
        if connections:
            loop.call_soon(self._look_at, connections)
        else:
            self._ticking = loop.call_later(TICK_S, self._look) if self.register else None

    def call_ended(self) -> None:
        self.open_calls -= 1
        self._changed.set()

    def warn(self, text: str) -> None:
        """Log it, at a limited rate."""
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            _log.warning("%s", text)

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()
