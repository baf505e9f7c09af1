"""A worker's side of a request: what it asked for, where it is, and what was seen there."""

from __future__ import annotations

import zlib

from hetero_gateway.core.types import InstanceId, Outcome, Request
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.dataplane.dispatcher import Placed, Seen
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.http.inbound import Inbound
from hetero_gateway.scaleout.workers import messages

_MARKED_BYTES = 2048
# What is shown of a request that was not described here.
_UNKNOWN = Request("", 1, 0.0)


class RemoteJob(Job):
    """A request that is described elsewhere. ``request`` is known once it is placed."""

    __slots__ = ("counted", "deadline_s", "described", "fallback", "key", "session")

    def __init__(
        self, inbound: Inbound, client: Client, parsed: ParsedRequest, counted: int | None
    ) -> None:
        super().__init__(inbound, client, parsed, _UNKNOWN, None)
        self.counted = counted
        self.deadline_s = 0.0
        self.described = False
        self.fallback = ""  # the model that it is for now, which has yet to be said
        self.key = 0
        self.session = 0  # in which the scheduler process knows it; 0: in none


class Assignment:
    """A place. ``local``: in the worker's own scheduler, while it is on its own."""

    __slots__ = ("began_s", "instance", "job", "local", "outcome", "placed_s", "waited_s")

    def __init__(
        self,
        job: RemoteJob,
        instance: Instance,
        placed_s: float,
        waited_s: float,
        local: Placed | None = None,
    ) -> None:
        self.job = job
        self.instance = instance
        self.placed_s = placed_s
        self.waited_s = waited_s
        self.local = local
        self.began_s: float | None = None
        self.outcome: Outcome | None = None

    # What the watch over streams asks of it

    @property
    def instance_id(self) -> InstanceId:
        return self.instance.id

    @property
    def request(self) -> Request:
        return self.job.request


def error_of(error: InstanceError) -> messages.Error:
    return messages.Error(error.failure, str(error), error.retry_after_s)


def report_of(seen: Seen, body: bytes) -> messages.Report:
    error = seen.error
    return messages.Report(
        seen.status,
        None if error is None else error_of(error),
        seen.first_body_at_s,
        seen.events,
        seen.empty,
        seen.complete,
        seen.usage(),
        mark(body),
        seen.body_bytes,
    )


def mark(body: bytes) -> bytes:
    """Tells a body from others, in every process: its length and its ends."""
    ends = zlib.crc32(body[-_MARKED_BYTES:], zlib.crc32(body[:_MARKED_BYTES]))
    return b"%x-%x" % (len(body), ends)
