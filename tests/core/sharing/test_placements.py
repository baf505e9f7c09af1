"""What gateways tell each other of what they have sent, and what is believed of it."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.prefixes.caches import PrefixCaches
from hetero_gateway.core.prefixes.engine_blocks import EngineBlocks
from hetero_gateway.core.request import Request, keys_of
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.sharing.placements import ENTRIES, ENTRY_BYTES, PlacementExchange, mark_of
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome, PrefixKeys, Reject

SECRET = b"a secret of all"
URLS = [(InstanceId("a"), "http://a"), (InstanceId("b"), "http://b")]


class Gateway:
    """A scheduler over two instances, and its side of the exchange."""

    def __init__(self, replica: int, kv_tokens: int = 100_000) -> None:
        self.scheduler = Scheduler(make_policy("round-robin"), np.random.default_rng(0))
        for instance_id, _ in URLS:
            self.scheduler.add(
                InstanceSpec(instance_id, frozenset({"m"}), kv_capacity_tokens=kv_tokens)
            )
        assert self.scheduler.caches is not None
        self.caches: PrefixCaches = self.scheduler.caches
        self.started_s: dict[InstanceId, float | None] = {}
        self.placements = PlacementExchange(self.caches, replica, lambda i: self.started_s.get(i))
        self.placements.mark = mark_of(SECRET)
        self.placements.set_instances(URLS)
        self.scheduler.on_dispatch = lambda dispatch, _: self.placements.note(dispatch)

    def send(self, keys: PrefixKeys, to: str = "a") -> Dispatch:
        request = Request("m", 1000, 10.0, prefix=keys, only=InstanceId(to))
        ticket = self.scheduler.place(request, 0.0)
        assert not isinstance(ticket, Reject)
        assert ticket.dispatch is not None
        return ticket.dispatch

    def matched(self, keys: PrefixKeys) -> dict[str, int]:
        """Bytes by instance."""
        return {
            name: depth
            for mask, depth in self.caches.index.levels(keys)
            for name in ("a", "b")
            if mask & 1 << self.caches.index.slot(InstanceId(name))
        }


def text(number: int, kilobytes: int = 4) -> PrefixKeys:
    rng = np.random.default_rng(number)
    return keys_of([rng.bytes(1024) for _ in range(kilobytes)], 7)


def test_what_one_has_sent_the_other_knows() -> None:
    one, other = Gateway(1), Gateway(2)
    one.send(text(1), "a")
    one.send(text(2), "b")
    (entry,) = one.placements.say(0.0)
    other.placements.hear(entry, 0.0)
    assert other.matched(text(1)) == one.matched(text(1)) == {"a": 4096}
    assert other.matched(text(2)) == {"b": 4096}
    assert one.placements.say(0.1) == []
    assert one.placements.counts["said"] == other.placements.counts["heard"] == 8


def test_of_the_next_turn_only_its_own_text_is_said() -> None:
    one, other = Gateway(1), Gateway(2)
    whole = text(1, 8)
    beginning = PrefixKeys(whole.hashes[:6], whole.ends[:6], whole.ends[5])
    for keys, said in ((beginning, 6), (whole, 8), (whole, 8)):
        one.send(keys)
        for entry in one.placements.say(0.0):
            other.placements.hear(entry, 0.0)
        assert one.placements.counts["said"] == said
    assert other.matched(whole) == {"a": 8192}
    one.send(whole)
    one.placements.say(30.0)
    assert one.placements.counts["said"] == 16, "again, lest others forget it"


def test_where_engines_tell_a_follow_up_at_another_gateway_finds_its_place() -> None:
    """The engine names a prompt by what the gateway that sent it has made of it: the other one
    knows no such name, but all that was sent."""
    one, other = Gateway(1), Gateway(2)
    blocks = EngineBlocks(other.caches.index, InstanceId("a"), 10_000)
    other.caches.listen(InstanceId("a"), blocks)
    whole = text(1, 8)
    beginning = PrefixKeys(whole.hashes[:6], whole.ends[:6], whole.ends[5])
    one.send(beginning)
    for entry in one.placements.say(0.0):
        other.placements.hear(entry, 0.0)
    blocks.stored(range(100, 196), None, 16, "of another gateway")
    assert other.matched(whole) == {"a": 6144}
    assert blocks.bound_keys == 0
    # With its own prompt all of the chain gets its keys, whoever computed it.
    other.send(whole)
    blocks.stored(range(196, 228), 195, 16, "own")
    blocks.ended("own", whole, 2048)
    assert blocks.bound_keys == 8
    blocks.removed([*range(140, 228)])
    assert 2048 <= other.matched(whole)["a"] <= 3072


def test_who_starts_recalls_what_all_have_sent_as_they_know_it() -> None:
    one, late = Gateway(1, kv_tokens=10_000), Gateway(1, kv_tokens=10_000)
    log: list[bytes] = []
    for number in range(40):  # twice as much as there is room for
        one.send(text(number), "ab"[number % 2])
        log += one.placements.say(number)
    assert late.placements.recall(log[:-5:-1])
    late.placements.recall(log[-5::-1])
    for number in range(40):
        assert late.matched(text(number)) == one.matched(text(number)), number
    assert one.matched(text(0)) == {}
    assert one.matched(text(39)) == {"b": 4096}


def test_what_was_recalled_goes_before_what_was_sent_here() -> None:
    one, late = Gateway(1, kv_tokens=4096), Gateway(2, kv_tokens=4096)
    one.send(text(1))
    entries = one.placements.say(0.0)
    late.send(text(2))
    late.placements.recall(entries)
    for number in range(3, 6):
        late.send(text(number))
    assert late.matched(text(1)) == {}
    assert late.matched(text(2)) == {"a": 3072}, "its end, at most"


def test_a_prompt_that_was_never_computed_is_not_told() -> None:
    one = Gateway(1)
    one.scheduler.settle(one.send(text(1)), Outcome.UPSTREAM_ERROR, 0.0)
    assert one.placements.say(0.0) == []


def test_an_engine_that_was_started_anew_has_nothing_of_what_was_sent_before() -> None:
    one, other, late = Gateway(1), Gateway(2), Gateway(3)
    one.started_s = {InstanceId("a"): 1000.0}
    one.send(text(1))
    entries = one.placements.say(0.0)
    other.started_s = {InstanceId("a"): 2000.0}
    other.placements.hear(entries[0], 0.0)
    assert other.matched(text(1)) == {}
    late.placements.recall(entries)  # before its first scrape
    assert late.matched(text(1)) == {"a": 4096}
    late.started_s = other.started_s
    late.placements.check()
    assert late.matched(text(1)) == {}


def test_other_names_are_left_out() -> None:
    one, other = Gateway(1), Gateway(2)
    one.placements.mark = mark_of(b"another secret")
    one.send(text(1))
    other.placements.hear(one.placements.say(0.0)[0], 0.0)
    assert other.matched(text(1)) == {}
    assert other.placements.counts["foreign"] == 1


def test_what_one_turn_says_is_bounded() -> None:
    one = Gateway(1, kv_tokens=10**8)
    for number in range(400):
        one.send(text(number, 32), "ab"[number % 2])
    entries = one.placements.say(0.0)
    assert len(entries) == ENTRIES
    assert all(len(entry) <= ENTRY_BYTES for entry in entries)
    counts = one.placements.counts
    assert counts["said"] + counts["left_out"] == 400 * 32
    assert counts["said"] > 0.9 * ENTRIES * ENTRY_BYTES / 10
    assert one.placements.say(1.0) == []


def test_a_liar_displaces_what_is_known_no_faster_than_an_engine_could() -> None:
    liar, other = Gateway(1, kv_tokens=10**6), Gateway(2, kv_tokens=100_000)
    other.send(text(0))
    rng = np.random.default_rng(1)
    now_s = 0.0
    for _ in range(4):  # in a second, twenty times what the cache holds
        for _ in range(ENTRIES):
            head = struct.pack("<4sBxxxQQ", b"hgp\0", 1, mark_of(SECRET), 1)
            key = liar.placements._keys[InstanceId("a")]
            keys = rng.integers(2**60, size=400, dtype=np.uint64)
            body = struct.pack("<QdH", key, 0.0, 400) + keys.tobytes()
            other.placements.hear(head + body + b"\xff\xff" * 400, now_s)
        other.send(text(0))  # what is in use stays
        now_s += 0.25
    used, most = other.caches.index.bytes_on(InstanceId("a"))
    assert used <= most
    assert other.matched(text(0)) == {"a": 4096}


@given(st.binary(max_size=200), st.integers(0, 60), st.booleans())
def test_what_is_no_entry_harms_nobody(noise: bytes, at: int, whole: bool) -> None:
    one, other = Gateway(1), Gateway(2)
    one.send(text(1))
    entry = bytearray(one.placements.say(0.0)[0])
    entry[at : at + len(noise)] = noise
    other.placements.hear(noise if whole else bytes(entry), 0.0)
    other.placements.recall([bytes(entry), noise])
    used, most = other.caches.index.bytes_on(InstanceId("a"))
    assert 0 <= used <= most


@pytest.mark.parametrize("entry", [b"", b"hgp\0", b"\0" * 5000])
def test_what_is_no_entry_is_counted(entry: bytes) -> None:
    other = Gateway(2)
    other.placements.hear(entry, 0.0)
    assert other.placements.counts["rejected"] == 1
