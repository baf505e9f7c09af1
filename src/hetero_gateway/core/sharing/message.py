"""The messages between gateways: a gateway's own rows, packed. Pure.

    header     "<4sBxHQ"  magic, version, sections, sequence (grows with every message of a replica)
    section    "<HHI"     kind, width, bytes that follow; readers skip unknown kinds, so that later
                          additions (prefix entries) need no new version
    kind 1     rows       n keys of 8 bytes, then n × width doubles: the fields of ``PeerLoad`` in
                          their order. Unknown further fields are ignored, missing ones are 0, so
                          that replicas of neighbouring releases understand each other.
                          Complete: instances without a row have nothing.
    kind 2     news       the same for some instances; the rows of the others still hold
    kind 3     accounts   as rows: clients' usage, requests and tokens of the last minute, and in
                          flight. Left out if empty

All is little-endian. A new version means: older readers cannot understand it at all. Rows that are
all 0 are sent as news only. Doubles, since exact values must stay exact: a load is a whole number
of 2^-40 s. 112 bytes for each instance that has anything on it.

A message comes from the network. An inconsistent one raises ``MessageError`` and harms nothing: no
size is believed, and numbers that no gateway could have counted are refused.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.instances.dispatch import PeerLoad

VERSION = 1
FIELDS = len(PeerLoad._fields)
# 18 000 instances, or 13 000 and as many accounts. No gateway writes a larger value.
MOST_BYTES = 2**21

_MAGIC = b"hgw\0"
_HEADER = struct.Struct("<4sBxHQ")
_SECTION = struct.Struct("<HHI")
_ROWS, _NEWS, _ACCOUNTS = 1, 2, 3
# Of an account: requests, tokens, in flight.
ACCOUNT_FIELDS = 3
# Far above any sum of tokens or seconds, and far below where doubles lose whole numbers.
_MOST = 2.0**50

Keys = NDArray[np.uint64]
Rows = NDArray[np.float64]


class MessageError(ValueError):
    """Not a message, or one that this release cannot read."""


class Message(NamedTuple):
    """Args:
    sequence: counts a replica's messages, from 1.
    keys: (n,) of instances, all different; see ``instance_key``.
    rows: (n, FIELDS) what the replica has on each, finite and at least 0.
    whole: these are all; otherwise news of some.
    account_keys, accounts: (m,), (m, ACCOUNT_FIELDS) clients' usage; see ``account_key``.
    """

    sequence: int
    keys: Keys
    rows: Rows
    whole: bool = True
    account_keys: Keys = np.empty(0, dtype=np.uint64)
    accounts: Rows = np.empty((0, ACCOUNT_FIELDS))


def instance_key(instance_id: str, base_url: str) -> int:
    """The engine's name for all replicas: 8 bytes of a hash over id *and* address.

    Both must agree. By the id alone, two clusters that call something ``gpu-0`` and share one Redis
    would charge each other's engines; by the address alone, so would two machines with a sidecar at
    ``http://127.0.0.1:8000``. A load that is not recognised costs a little balance; one charged to
    the wrong engine costs a lot.
    """
    text = f"{instance_id}\0{base_url.rstrip('/')}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def pack(message: Message) -> bytes:
    """The bytes of a message."""
    kinds = [(_ROWS if message.whole else _NEWS, message.keys, message.rows)]
    if message.account_keys.size:
        kinds.append((_ACCOUNTS, message.account_keys, message.accounts))
    parts = [_HEADER.pack(_MAGIC, VERSION, len(kinds), message.sequence)]
    for kind, keys, rows in kinds:
        body = keys.astype("<u8").tobytes() + rows.astype("<f8").tobytes()
        parts += (_SECTION.pack(kind, rows.shape[1], len(body)), body)
    return b"".join(parts)


def unpack(data: bytes) -> Message:
    """The message in these bytes. Raises MessageError."""
    if not _HEADER.size <= len(data) <= MOST_BYTES:
        raise MessageError(f"{len(data)} bytes")
    magic, version, sections, sequence = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise MessageError("not written by a gateway")
    if version != VERSION:
        raise MessageError(f"version {version}; this release reads {VERSION}")
    message = Message(sequence, np.empty(0, dtype=np.uint64), np.empty((0, FIELDS)))
    offset = _HEADER.size
    for _ in range(sections):
        if offset + _SECTION.size > len(data):
            raise MessageError("a section is missing")
        kind, width, size = _SECTION.unpack_from(data, offset)
        offset += _SECTION.size
        if size > len(data) - offset:
            raise MessageError("a section is cut short")
        if kind in (_ROWS, _NEWS):
            keys, rows = _rows(data, offset, width, size, FIELDS)
            message = message._replace(keys=keys, rows=rows, whole=kind == _ROWS)
        elif kind == _ACCOUNTS:
            keys, rows = _rows(data, offset, width, size, ACCOUNT_FIELDS)
            message = message._replace(account_keys=keys, accounts=rows)
        offset += size
    return message


def _rows(data: bytes, offset: int, width: int, size: int, fields: int) -> tuple[Keys, Rows]:
    row_bytes = 8 + 8 * width
    count, rest = divmod(size, row_bytes)
    if rest:
        raise MessageError(f"{size} bytes are no rows of {width} fields")
    keys = np.frombuffer(data, "<u8", count, offset).astype(np.uint64)
    told = np.frombuffer(data, "<f8", count * width, offset + 8 * count).reshape(count, width)
    known = min(width, fields)
    rows = np.zeros((count, fields))
    rows[:, :known] = told[:, :known]
    # NaN is in no range.
    if not ((rows >= 0) & (rows <= _MOST)).all():
        raise MessageError("a number is out of range")
    if np.unique(keys).size != count:
        raise MessageError("an instance or an account is there twice")
    return keys, rows
