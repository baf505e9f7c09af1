"""Frames of HTTP/2 (RFC 9113) as bytes, and the header blocks that a gRPC server sends."""

import enum
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# A frame's head: 24 bits of length, 8 of type; 8 of flags; 32 of stream.
HEAD = struct.Struct(">IBI")
HEAD_BYTES = 9
# Maximum of a frame's payload, in both directions: the least that both sides must accept.
MAX_FRAME_BYTES = 16384
MAX_WINDOW_BYTES = 2**31 - 1
# A gRPC message's head: whether it is compressed, and its length.
MESSAGE_HEAD = struct.Struct(">BI")
MESSAGE_HEAD_BYTES = 5

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = range(9)
CONTINUATION = 9

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = range(1, 5)
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 5, 6


class ErrorCode(enum.IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Status(enum.IntEnum):
    """gRPC's status codes."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class ProtocolError(Exception):
    """The peer broke the protocol: the connection ends. ``code``: the one sent to it."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *each) for each in values.items()))


def window_update(stream_id: int, more_bytes: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, more_bytes.to_bytes(4, "big"))


def reset(stream_id: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: ErrorCode, detail: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">II", last_stream_id, code) + detail.encode())


def message(data: bytes) -> bytes:
    return MESSAGE_HEAD.pack(0, len(data)) + data


def _literal(name: bytes, value: bytes) -> bytes:
    """A field that is not put in a table (RFC 7541, 6.2.2); name and value below 127 bytes."""
    return b"\0%c%b%c%b" % (len(name), name, len(value), value)


_STATUS_200 = b"\x88"  # entry 8 of the static table
RESPONSE_HEAD = _STATUS_200 + _literal(b"content-type", b"application/grpc")
TRAILERS_OK = _literal(b"grpc-status", b"0")


def trailers(status: Status, detail: str) -> bytes:
    """``detail``: printable ASCII without "%"; at most 100 characters of it are sent."""
    return _literal(b"grpc-status", b"%d" % status) + _literal(
        b"grpc-message", detail[:100].encode("ascii", "replace")
    )
