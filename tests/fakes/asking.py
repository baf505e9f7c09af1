"""Messages that a data plane sends the picker, as it asks for one request's instance."""

from hetero_gateway.scaleout.picker.http2 import frames
from hetero_gateway.scaleout.picker.http2.frames import DATA, END_HEADERS, HEADERS, frame
from hetero_gateway.scaleout.picker.protocol.messages_pb2 import ProcessingRequest
from hetero_gateway.scaleout.picker.service import EXT_PROC, HEALTH, REPORTS
from tests.fakes.peers import header_block, table_less_encoder

PROCESS, REPORT = f"/{EXT_PROC}/Process", f"/{REPORTS}/Report"
CHECK, WATCH = f"/{HEALTH}/Check", f"/{HEALTH}/Watch"
BUFFERED, FULL_DUPLEX = 2, 4


def head(
    *fields: tuple[str, str], body_mode: int = BUFFERED, response_mode: int = 0, ends: bool = False
) -> ProcessingRequest:
    """A request's head; ``fields``: besides those that every request has."""
    message = ProcessingRequest()
    usual = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
    for name, value in (usual | dict(fields)).items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = ends
    message.protocol_config.request_body_mode = body_mode
    message.protocol_config.response_body_mode = response_mode
    return message


def head_bytes(*fields: tuple[str, str], **options: int) -> bytes:
    return head(*fields, **options).SerializeToString()  # type: ignore[arg-type]


def body(size_bytes: int = 5) -> bytes:
    """A request's body of a bit more than that."""
    return b'{"model":"m","max_tokens":4,"messages":[{"role":"user","content":"%s"}]}' % (
        b"x" * size_bytes
    )


def body_bytes(data: bytes, *, ends: bool = True) -> bytes:
    message = ProcessingRequest()
    message.request_body.body = data
    message.request_body.end_of_stream = ends
    return message.SerializeToString()


def response_head_bytes(status: int = 200) -> bytes:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"%d" % status)
    return message.SerializeToString()


def response_body_bytes(data: bytes, *, ends: bool = False) -> bytes:
    message = ProcessingRequest()
    message.response_body.body = data
    message.response_body.end_of_stream = ends
    return message.SerializeToString()


_ENCODER = table_less_encoder()
header_block(PROCESS, _ENCODER)  # the first one differs


def opened(numbers: range, *messages: bytes, path: str = PROCESS) -> bytes:
    """Calls, each with the same messages."""
    rest = b"".join(frames.message(each) for each in messages)
    pieces = [rest[at : at + 16384] for at in range(0, len(rest), 16384)]
    return b"".join(
        frame(HEADERS, END_HEADERS, number, _block(number, path))
        + b"".join(frame(DATA, 0, number, piece) for piece in pieces)
        for number in numbers
    )


def _block(number: int, path: str) -> bytes:
    return header_block(path) if number == 1 else header_block(path, _ENCODER)


def numbers(count: int, first: int = 1) -> range:
    return range(first, first + 2 * count, 2)


def in_data(stream_id: int, *messages: bytes) -> bytes:
    whole = b"".join(frames.message(each) for each in messages)
    return b"".join(
        frame(DATA, 0, stream_id, whole[at : at + 16384]) for at in range(0, len(whole), 16384)
    )


# Of one attack.
INPUT_BYTES = 65536


def many(data: bytes) -> bytes:
    return data * (INPUT_BYTES // len(data))


WHOLE = (head_bytes(), body_bytes(body()))
DUPLEX = (
    head_bytes(body_mode=FULL_DUPLEX, response_mode=FULL_DUPLEX),
    body_bytes(body(20_000)),
)
NO_WINDOW = frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
WINDOWS = frames.settings({frames.INITIAL_WINDOW_SIZE: 1}) + NO_WINDOW
