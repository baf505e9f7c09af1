"""How an attempt on an instance can fail, and what follows from each way.

A member's value is its label in metrics, so the list is bounded. What follows is stated once, here:
the relay raises or notes an ``InstanceError``, and whoever answers the client, tries again, settles
or informs the health monitor asks its ``failure``.
"""

import enum
from typing import Any

from hetero_gateway.core.types import Outcome
from hetero_gateway.errors import HeteroGatewayError


class Suspicion(enum.Enum):
    """What a failure says of its instance."""

    NONE = enum.auto()
    PROBE = enum.auto()  # it may be down: probe it now
    DOWN = enum.auto()  # nobody answers there


class Blame(enum.Enum):
    """What a failure counts as among its instance's outcomes (core/instances/outcomes.py)."""

    NONE = enum.auto()  # nothing: it is no fault of the instance
    FAULT = enum.auto()
    SILENCE = enum.auto()  # a fault, if nothing good was heard of it meanwhile
    BUSY = enum.auto()  # its engine is full, which is no fault: it is spared for a while


class Failure(enum.Enum):
    """One way in which an attempt fails.

    Attributes:
        status, code: for the client, when nothing of the response was passed on.
        outcome: the dispatch's.
        retryable: whether another attempt may succeed where no byte has reached the client. A
            time-out is not: the client has waited, and a second engine would do the work again.
        suspicion: what it says of the instance.
        blame: what it counts as among the instance's outcomes.
    """

    CONNECT = "connect", 503, "no_healthy_instance", True, Suspicion.DOWN, Blame.FAULT
    # Closed before the response was complete.
    RESET = "reset", 502, "upstream_error", True, Suspicion.PROBE, Blame.FAULT
    PROTOCOL = "protocol", 502, "upstream_error", True, Suspicion.NONE, Blame.FAULT
    # It is a gateway, and leads back to one that the request has come through.
    LOOP = "loop", 508, "loop_detected", False, Suspicion.PROBE, Blame.FAULT
    # All of the gateway's connections to the instance are in use.
    POOL = "pool", 503, "no_free_connection", True, Suspicion.NONE, Blame.NONE
    # The gateway's own: it has no descriptor, port or memory left for a connection.
    LOCAL = "local", 503, "gateway_exhausted", True, Suspicion.NONE, Blame.NONE
    FIRST_BYTE_TIMEOUT = (
        "first_byte_timeout", 504, "upstream_timeout", False, Suspicion.PROBE, Blame.SILENCE
    )  # fmt: skip
    IDLE_TIMEOUT = (
        "idle_timeout", 504, "upstream_timeout", False, Suspicion.NONE, Blame.SILENCE
    )  # fmt: skip
    # Nothing is heard of the instance, which is ejected for that already.
    SILENT = "silent", 502, "upstream_error", True, Suspicion.NONE, Blame.NONE
    TOTAL_TIMEOUT = "total_timeout", 504, "upstream_timeout", False, Suspicion.NONE, Blame.NONE
    # The response ended well in HTTP, but it says that the engine broke off.
    ENGINE = "engine", 502, "upstream_error", False, Suspicion.PROBE, Blame.FAULT
    # Or there is nothing in it.
    EMPTY = "empty", 502, "upstream_error", True, Suspicion.PROBE, Blame.FAULT
    # The engine answers with an error of its own, which its client gets where nobody else answers.
    SERVER_ERROR = "server_error", 502, "upstream_error", True, Suspicion.PROBE, Blame.FAULT
    # Its instance drains, and what has not ended by a deadline leaves it.
    MOVED = "moved", 503, "upstream_error", True, Suspicion.NONE, Blame.NONE
    # The KV cache of a prompt that another instance computed did not arrive: the pair's fault.
    HANDOVER = "handover", 502, "upstream_error", True, Suspicion.NONE, Blame.NONE
    # A stream that broke off elsewhere: its engine does not take the rest for a request.
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

    ``retry_after_s``: when it is to be tried again, if an engine that is busy said so. ``refused``:
    nobody listens there, as was told at once, and nothing was sent.
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
