"""What engines tell of their prefix caches, in both encodings, and what is no such message."""

import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.engines.vllm.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventError,
    KvEventSource,
    read_kv_event_sources,
    read_kv_events,
)

pack = msgspec.msgpack.encode
STORED = {
    "type": "BlockStored", "block_hashes": [2**63 + 5, 7], "parent_block_hash": None,
    "token_ids": list(range(256)), "block_size": 128, "lora_id": None, "medium": "GPU",
    "lora_name": None, "extra_keys": [["salt"], None], "group_idx": 0,
    "kv_cache_spec_kind": "full_attention", "session_id": "req-1",
}  # fmt: skip


def events_of(*events: object, rank: object = 0) -> list[object]:
    return list(read_kv_events(pack([1.5, list(events), rank])).events)


def test_maps_and_arrays_say_the_same() -> None:
    as_maps = events_of(
        STORED,
        {"type": "BlockStored", "block_hashes": [9], "parent_block_hash": 7, "block_size": 128},
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    )
    as_arrays = events_of(
        ["BlockStored", [2**63 + 5, 7], None, list(range(256)), 128, None, "GPU", None],
        ["BlockStored", [9], 7, [1] * 128, 128],
        ["BlockRemoved", [7], "CPU"],
        ["AllBlocksCleared"],
    )
    stored = BlockStored((2**63 + 5, 7), None, 128, "req-1")
    rest = [BlockStored((9,), 7, 128), BlockRemoved((7,), "CPU"), AllBlocksCleared()]
    assert as_maps == [stored, *rest]
    assert as_arrays == [stored._replace(session=""), *rest]


def test_hashes_of_bytes_are_their_last_eight() -> None:
    (event,) = events_of(["BlockStored", [b"\1" * 24 + b"\0" * 7 + b"\5"], b"\7", [], 16])
    assert event == BlockStored((5,), 7, 16)


def test_what_is_newer_is_skipped() -> None:
    assert events_of({"type": "BlockWarmed", "x": 1}, ["BlockWarmed", 1], STORED | {"new": 1}) == [
        BlockStored((2**63 + 5, 7), None, 128, "req-1")
    ]
    assert read_kv_events(pack([1.0, [], 3, "more"])).rank == 3


def test_of_several_groups_full_attention_counts() -> None:
    window = STORED | {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    assert events_of(window, {"type": "BlockRemoved", "block_hashes": [7], "group_idx": 1}) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", pack({}), pack([1.0]), pack([1.0, 5, 0]), pack([1.0, [], -1]),
        pack([1.0, [["BlockStored"]], 0]), pack([1.0, [{"type": "BlockStored"}], 0]),
        pack([1.0, [STORED | {"block_size": 0}], 0]),
        pack([1.0, [STORED | {"block_hashes": ["x"]}], 0]),
        pack([1.0, [STORED | {"block_hashes": [1] * 70_000}], 0]),
        pack([1.0, [["AllBlocksCleared"]] * 70_000, 0]), b"\xdd\xff\xff\xff\xff",
        pack([1.0, [STORED | {"block_hashes": [1] * 16_000}] * 5, 0]),
        b"\x91" * 100_000, b"x" * (2**22 + 1),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(KvEventError):
        read_kv_events(payload)


@pytest.mark.parametrize(
    "inside", [b"", b"\x91\x82\xa4type\xabBlockStored\xacblock_hashes", b"\x91"]
)
def test_millions_of_nothings_are_refused_by_their_head(inside: bytes) -> None:
    """As events, as hashes of one, as fields of one: no object for each."""
    payload = b"\x92\xcb" + bytes(8) + inside + b"\xdd\x00\x3d\x09\x00" + b"\xc0" * 4_000_000
    tracemalloc.start()
    with pytest.raises(KvEventError):
        read_kv_events(payload)
    # An event's own bytes are copied once or twice.
    assert tracemalloc.get_traced_memory()[1] < 4 * len(payload)
    tracemalloc.stop()


@given(st.binary(max_size=300), st.integers(0, 400))
def test_whatever_comes_is_events_or_an_error(noise: bytes, at: int) -> None:
    payload = bytearray(pack([1.5, [STORED, ["BlockRemoved", [7], "GPU"]], 0]))
    payload[at : at + len(noise)] = noise
    for each in (bytes(payload), noise):
        try:
            events, rank, _ = read_kv_events(each)
        except KvEventError:
            continue
        assert rank >= 0
        for event in events:
            assert isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared)
            assert all(0 <= value < 2**64 for value in getattr(event, "hashes", ()))


def sources(**changes: object) -> list[KvEventSource]:
    config = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://127.0.0.1:5558", "buffer_steps": 10000, "topic": "kv",
    }  # fmt: skip
    return read_kv_event_sources(json.dumps({"0": config | changes}).encode())


def test_sources_are_ports_of_the_engine_s_own_host() -> None:
    assert sources() == [KvEventSource(0, 5557, 5558, "kv", loopback_replay=True)]
    assert sources(endpoint="tcp://[::]:7", replay_endpoint="tcp://*:8") == [
        KvEventSource(0, 7, 8, "kv")
    ]
    assert sources(replay_endpoint="tcp://10.0.0.9:8")[0].replay_port is None
    assert sources(replay_endpoint=None)[0].replay_port is None
    assert read_kv_event_sources(b"{}") == []
    for changes in (
        {"enable_kv_cache_events": False},
        {"publisher": "null"},
        {"endpoint": "tcp://10.0.0.5:5557"},  # it connects there itself
        {"endpoint": "ipc:///tmp/x"},
        {"endpoint": "tcp://*:0"},
        {"endpoint": "tcp://*:99999"},
        {"endpoint": None},
    ):
        assert sources(**changes) == []


@given(st.binary(max_size=100) | st.text(max_size=60).map(str.encode))
def test_whatever_is_answered_is_sources_or_an_error(body: bytes) -> None:
    try:
        assert isinstance(read_kv_event_sources(body), list)
    except KvEventError:
        pass


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"x": {}}', b'{"-1": {}}', b'{"0": 1}'])
def test_what_is_no_list_of_sources_is_refused(body: bytes) -> None:
    with pytest.raises(KvEventError):
        read_kv_event_sources(body)
