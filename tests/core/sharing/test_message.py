"""The format between gateways: what is packed comes back, and nonsense harms nobody."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.sharing.message import (
    FIELDS,
    MOST_BYTES,
    VERSION,
    Message,
    MessageError,
    instance_key,
    pack,
    unpack,
)

HEADER_BYTES, SECTION_BYTES = 16, 8


def message(count: int = 3, sequence: int = 7) -> Message:
    rng = np.random.default_rng(count)
    keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2**60 // 3)
    return Message(sequence, keys, rng.random((count, FIELDS)) * 1e6)


def same(a: Message, b: Message) -> bool:
    return a.sequence == b.sequence and bool((a.keys == b.keys).all() and (a.rows == b.rows).all())


@pytest.mark.parametrize("count", [0, 1, 5, 512])
def test_what_is_packed_comes_back_exactly(count: int) -> None:
    told = message(count)
    data = pack(told)
    assert same(unpack(data), told)
    assert len(data) == HEADER_BYTES + SECTION_BYTES + count * 8 * (1 + FIELDS)


def section(kind: int, body: bytes, width: int = 0) -> bytes:
    return struct.pack("<HHI", kind, width, len(body)) + body


def test_what_is_shared_later_is_skipped_by_readers_of_today() -> None:
    """Prefix entries, say, will be sections of their own, in the same version."""
    told = message(5)
    data = pack(told)
    limits = section(5, bytes(range(256)) * 64, width=2)
    prefixes = section(4, b"\xff" * 2**20, width=16)  # as a row it would be nonsense
    nothing = section(2**16 - 1, b"")
    sections = (nothing, limits, data[HEADER_BYTES:], prefixes, nothing)
    header = data[:6] + struct.pack("<H", len(sections)) + data[8:HEADER_BYTES]
    assert same(unpack(header + b"".join(sections)), told)
    # A message without rows says nothing of instances.
    assert unpack(header[:6] + struct.pack("<H", 1) + header[8:] + limits).keys.size == 0
    # A later section that is cut short is no reason to believe the rest.
    with pytest.raises(MessageError, match="cut short"):
        unpack((header + b"".join(sections))[:-9])


def test_news_are_told_from_all_that_there_is() -> None:
    told = message()._replace(whole=False)
    got = unpack(pack(told))
    assert same(got, told)
    assert (got.whole, unpack(pack(message())).whole) == (False, True)
    # A reader that knows no news skips them, as any section: this is where their kind stands.
    assert pack(told)[HEADER_BYTES] != pack(message())[HEADER_BYTES]


def test_fields_of_a_later_release_are_ignored_and_missing_ones_are_0() -> None:
    told = message(2)
    wide = told._replace(rows=np.concatenate((told.rows, np.ones((2, 3))), axis=1))
    assert same(unpack(pack(wide)), told)
    narrow = told._replace(rows=told.rows[:, :4])
    got = unpack(pack(narrow))
    assert (got.rows[:, :4] == told.rows[:, :4]).all()
    assert not got.rows[:, 4:].any()


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, 2.0**51])
def test_a_number_that_no_gateway_counts_is_refused(value: float) -> None:
    told = message()
    told.rows[1, 4] = value
    with pytest.raises(MessageError, match="out of range"):
        unpack(pack(told))


def test_another_version_and_other_bytes_are_refused() -> None:
    data, told = bytearray(pack(message())), message(2)
    data[4] = VERSION + 1
    for odd, why in (
        (bytes(data), f"version {VERSION + 1}"),
        (b"x" * 64, "not written by a gateway"),
        (bytes(MOST_BYTES + 1), "bytes"),
        # An instance stands in a message once.
        (pack(told._replace(keys=told.keys[[0, 0]])), "twice"),
    ):
        with pytest.raises(MessageError, match=why):
            unpack(odd)


@given(st.data())
def test_whatever_comes_it_is_a_message_or_an_error(data: st.DataObject) -> None:
    whole = bytearray(pack(message()))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        got = unpack(cut)
    except MessageError:
        return
    assert got.rows.shape == (got.keys.size, FIELDS)
    assert (got.rows >= 0).all()


def test_an_instance_is_known_by_its_id_and_address_together() -> None:
    key = instance_key("gpu-0", "http://10.0.0.5:8000")
    assert key == instance_key("gpu-0", "http://10.0.0.5:8000/")
    assert key != instance_key("gpu-1", "http://10.0.0.5:8000")
    assert key != instance_key("gpu-0", "http://10.0.0.6:8000")
    assert 0 <= key < 2**64
