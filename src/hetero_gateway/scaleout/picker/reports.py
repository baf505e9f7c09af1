"""A data plane's reports on responses whose bodies the picker never sees.

A script in Envoy (docker/envoy/envoy.yaml) sends one short message at a stream's first bytes, and
one at a response's end, by a unary call of ``hetero_gateway.Reports/Report``:

    TICKET first
    TICKET end PROMPT OUTPUT CACHED EVENTS

in ASCII, padded with spaces. TICKET identifies the request: the picker put it in its answer, in the
dynamic metadata ``hetero_gateway``. PROMPT, OUTPUT and CACHED are the usage in tokens, "-" if not
stated; EVENTS is the number of server-sent events. The calls come on the connection of the
request's own stream, or on another one from the same address, before its end. Reports on ended
requests and those from another address are ignored; the figures in others are bounded like
everything that an engine says (``dataplane/records``).
"""

import os
import re
import secrets
import time
from dataclasses import dataclass
from typing import Protocol

from hetero_gateway.core.types import Usage
from hetero_gateway.errors import Refusal
from hetero_gateway.scaleout.picker.http2.calls import Call
from hetero_gateway.scaleout.picker.http2.frames import Status

_REPORT = re.compile(rb"(\d{20}) (?:first|end (\d{1,9}|-) (\d{1,9}|-) (\d{1,9}|-) (\d{1,9})) *")
# How long first bytes are predicted after a report for another picker.
_STRAY_S = 60.0


class Reported(Protocol):
    """A request, as seen by a data plane's reports."""

    @property
    def address(self) -> str:
        """Of the data plane that asked."""

    def first_bytes(self) -> None:
        """The first bytes of a streamed body have passed."""

    def told(self, usage: Usage, events: int) -> None:
        """The body has passed, and its end stated these figures."""


class Tickets:
    """Tickets for responses, by which the data plane may report on them."""

    def __init__(self) -> None:
        # Envoy may ask several pickers in turn: tickets of another one must be recognisable.
        self.prefix = b"%010d" % secrets.randbelow(10**10)
        self.issued: dict[bytes, Reported] = {}

    def issue(self, request: Reported) -> bytes:
        """A new ticket."""
        while True:
            # Random: the owner of one ticket must not guess others', nor report on their requests.
            number = int.from_bytes(os.urandom(8), "big") % 10**10
            ticket = b"%b%010d" % (self.prefix, number)
            if ticket not in self.issued:
                self.issued[ticket] = request
                return ticket


@dataclass(slots=True, eq=False)
class ReportCall:
    """One report: a ``Receiver``."""

    _tickets: Tickets
    _call: Call

    def message(self, data: bytes) -> None:
        found = _REPORT.fullmatch(data)
        if found is None:
            self._call.finish(Status.INVALID_ARGUMENT, "this is no report")
            return
        peer, now_s = self._call.peer, time.monotonic()
        if found[1].startswith(self._tickets.prefix):
            peer.reports = now_s >= peer.stray_until_s
        else:
            # For another picker: some reports for this one will go there.
            peer.reports, peer.stray_until_s = False, now_s + _STRAY_S
        request = self._tickets.issued.get(found[1])
        if request is not None and request.address == peer.address:
            if found[5] is None:
                request.first_bytes()
            else:
                counts = [None if said == b"-" else int(said) for said in found.group(2, 3, 4)]
                request.told(Usage(*counts), int(found[5]))
        self._call.finish()

    def refuse(self, refusal: Refusal) -> None:
        self._call.finish(Status.RESOURCE_EXHAUSTED, "the message is too long")

    def half_closed(self) -> None:
        self._call.finish(Status.INVALID_ARGUMENT, "there was no message")

    def lost(self) -> None: ...
