"""Header blocks of requests: the path that they ask for.

A data plane sends few different blocks. With a header table of size 0 a block always means the
same, so that one that was decoded before is only looked up.

Decoding is the `hpack` library's, which bounds the decoded size and the length of numbers. It
spends 0.25 µs per byte of Huffman code and 8 µs per update of its table size; a block's length and
its updates are bounded here, so that the worst block takes 2 ms.
"""

import re

import hpack

from hetero_gateway.scaleout.picker.http2.frames import ErrorCode, ProtocolError

# The limit of other gRPC servers; a data plane's own block has 200 bytes, with a trace's id 300.
MAX_BLOCK_BYTES = 8192
# Data planes have a few different blocks each; those with a trace's id are all different.
_MAX_KNOWN = 256
_MAX_KNOWN_BYTES = 1024
# RFC 7541, 4.2: a block begins with at most two updates of the table's size. `hpack` would accept
# one in every byte.
_THREE_UPDATES = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}")

PathsByBlock = dict[bytes, str]


class HeaderBlocks:
    """The blocks of one connection.

    Args:
        known: paths by block, of all connections of the server.
    """

    __slots__ = ("_decoder", "_known", "_stateless")

    def __init__(self, known: PathsByBlock) -> None:
        self._known = known
        self._decoder = hpack.Decoder(MAX_BLOCK_BYTES)
        self._stateless = False  # every block always means the same

    def known(self, block: bytes) -> str | None:
        """The path of a block that needs no decoding."""
        return self._known.get(block) if self._stateless else None

    def forbid_table(self) -> None:
        """The peer knows the table's size now: its next block begins with that."""
        self._decoder.max_allowed_table_size = 0

    def path_of(self, block: bytes) -> str:
        """The path that a block asks for; "" if it is not a gRPC call."""
        decoder = self._decoder
        try:
            if _THREE_UPDATES.match(block):
                raise hpack.HPACKDecodingError("too many updates of the table's size")
            found = {str(name): str(value) for name, value in decoder.decode(block)}
        except hpack.HPACKError as error:
            raise ProtocolError(ErrorCode.COMPRESSION_ERROR, "a header block") from error
        path = found.get(":path", "")
        if found.get(":method") != "POST" or not found.get("content-type", "").startswith(
            "application/grpc"
        ):
            path = ""
        if self._stateless:
            self._remember(block, path)
        elif decoder.max_allowed_table_size == 0 and decoder.header_table_size == 0:
            # From now on; this one began with the update of the size.
            self._stateless = True
        return path

    def _remember(self, block: bytes, path: str) -> None:
        if len(block) <= _MAX_KNOWN_BYTES:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[block] = path
