"""The ways in which an attempt on an instance can fail, and the consequences of each.

A member's value is its label in metrics, so the list is bounded. The consequences are stated once,
here: the relay raises or notes an ``InstanceError``, and the code that answers the client, retries,
settles or informs the health monitor asks its ``failure``.
"""

import enum
from typing import Any

from hetero_gateway.core.types import Outcome
from hetero_gateway.errors import HeteroGatewayError


class Suspicion(enum.Enum):
    """What a failure suggests about its instance."""

    NONE = enum.auto()
    PROBE = enum.auto()  # it may be down: probe it now
    DOWN = enum.auto()  # nothing answers there


class Blame(enum.Enum):
    """How a failure counts among its instance's outcomes (core/instances/outcomes.py)."""

    NONE = enum.auto()  # nothing: not the instance's fault
    FAULT = enum.auto()
    SILENCE = enum.auto()  # a fault, unless something good was heard from it meanwhile
    BUSY = enum.auto()  # its engine is full, which is no fault: it gets a pause


class Failure(enum.Enum):
    """One way in which an attempt fails.

    Attributes:
        status, code: for the client, if nothing of the response was passed on.
        outcome: the dispatch's.
        retryable: whether another attempt may succeed if no byte has reached the client. A time-out
            is not: the client has waited, and a second engine would do the work again.
        suspicion: what it suggests about the instance.
        blame: how it counts among the instance's outcomes.
    """

    CONNECT = "connect", 503, "no_healthy_instance", True, Suspicion.DOWN, Blame.FAULT
    # Closed before the response was complete.
    RESET = "reset", 502, "upstream_error", True, Suspicion.PROBE, Blame.FAULT
    PROTOCOL = "protocol", 502, "upstream_error", True, Suspicion.NONE, Blame.FAULT
    # It is a gateway, and leads back to one that the request has come through.
    LOOP = "loop", 508, "loop_detected", False, Suspicion.PROBE, Blame.FAULT
    # All of the gateway's connections to the instance are in use.
    POOL = "pool", 503, "no_free_connection", True, Suspicion.NONE, Blame.NONE
    # The gateway's own lack of a descriptor, port or memory for a connection.
    LOCAL = "local", 503, "gateway_exhausted", True, Suspicion.NONE, Blame.NONE
    FIRST_BYTE_TIMEOUT = (
        "first_byte_timeout", 504, "upstream_timeout", False, Suspicion.PROBE, Blame.SILENCE
    )  # fmt: skip
    IDLE_TIMEOUT = (
        "idle_timeout", 504, "upstream_timeout", False, Suspicion.NONE, Blame.SILENCE
    )  # fmt: skip
    # Nothing is heard from the instance, which is already ejected for that.
    SILENT = "silent", 502, "upstream_error", True, Suspicion.NONE, Blame.NONE
    TOTAL_TIMEOUT = "total_timeout", 504, "upstream_timeout", False, Suspicion.NONE, Blame.NONE
    # The response ended well in HTTP, but reports that the engine broke off.
    ENGINE = "engine", 502, "upstream_error", False, Suspicion.PROBE, Blame.FAULT
    # Or it is empty.
    EMPTY = "empty", 502, "upstream_error", True, Suspicion.PROBE, Blame.FAULT
    # The engine answers with its own error, which the client gets if no other instance answers.
    SERVER_ERROR = "server_error", 502, "upstream_error", True, Suspicion.PROBE, Blame.FAULT
    # Its instance is draining, and requests unfinished at a deadline leave it.
    MOVED = "moved", 503, "upstream_error", True, Suspicion.NONE, Blame.NONE
    # The KV cache of a prompt computed by another instance did not arrive: the pair's fault.
    HANDOVER = "handover", 502, "upstream_error", True, Suspicion.NONE, Blame.NONE
    # A stream that broke off elsewhere: its engine does not accept the rest as a request.
    NOT_CONTINUED = "not_continued", 502, "upstream_error", False, Suspicion.NONE, Blame.NONE
    # Its engine does not have the model (any more) that it was believed to have.
    MODEL_GONE = "model_gone", 404, "model_not_found", True, Suspicion.NONE, Blame.NONE
    # 503 or 429.
    BUSY = "busy", 503, "upstream_busy", True, Suspicion.NONE, Blame.BUSY

    status: int
    code: str
    outcome: Outcome
    retryable: bool
    suspicion: Suspicion
    blame: Blame

    def __new__(cls, label: str, *what: Any) -> "Failure":
        member = object.__new__(cls)
        member._value_ = label
        member.status, member.code, member.retryable, member.suspicion, member.blame = what
        member.outcome = Outcome.TIMED_OUT if member.status == 504 else Outcome.UPSTREAM_ERROR
        return member


class InstanceError(HeteroGatewayError):
    """An attempt on an instance failed: connect, time-out, broken stream, an engine's own error.

    ``retry_after_s``: when to try again, if a busy engine said so. ``refused``: the connection was
    refused at once, and nothing was sent.
    """

    def __init__(
        self,
        failure: Failure,
        message: str,
        retry_after_s: float | None = None,
        *,
        refused: bool = False,
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.retry_after_s = retry_after_s
        self.refused = refused

    @property
    def reason(self) -> str:
        """A bounded label for metrics."""
        return str(self.failure.value)
