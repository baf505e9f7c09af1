"""The interface between an attempt and the scheduler.

``Dispatcher`` is all that ``attempts`` knows of scheduling: describe, submit, and the events of a
placed attempt until it is settled. ``placement.LocalDispatcher`` drives the scheduler of this
process, for everyone: clients' requests, those of workers (``scaleout.workers``) and the picker's
streams. ``scaleout.workers.remote`` has the same calls and puts them on a wire. None of them waits:
later results are reported to the request's ``Owner`` in a callback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from mypy_extensions import mypyc_attr

from hetero_gateway.core.types import COMPLETED, InstanceId, Outcome, Reject
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.dataplane.intake import Job, Placed
from hetero_gateway.gateway.dataplane.observed import ObservedResponse
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.http.heads import Inbound


class Place(Protocol):
    """Where a request goes. ``waited_s``: in the queue."""

    @property
    def instance(self) -> Instance: ...

    @property
    def waited_s(self) -> float: ...


JobT = TypeVar("JobT", bound=Job)
PlaceT = TypeVar("PlaceT", bound=Place)
PlaceT_contra = TypeVar("PlaceT_contra", bound=Place, contravariant=True)


class Owner(Protocol[PlaceT_contra]):
    """The owner of a request. One of these is called for each ``Waiting``, unless it left.

    They do not raise.
    """

    def placed(self, place: PlaceT_contra | Reject) -> None: ...

    def turned_away(self, refusal: Refusal) -> None:
        """It waited too long, or the gateway is shutting down."""
        ...

    def broke(self, error: Exception) -> None:
        """Placing it met a bug."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Waiting:
    """A request that has no place yet."""

    __slots__ = ()

    def leave(self) -> None:
        """Withdraw it; its owner is not called any more."""
        raise NotImplementedError


def report_to(
    owner: Owner[Placed], submit: Callable[[], Placed | Reject | Waiting]
) -> Waiting | None:
    """Submit, and report an immediate result at once; the returned value waits for later ones."""
    try:
        place = submit()
    except Refusal as refusal:
        owner.turned_away(refusal)
    except Exception as error:
        owner.broke(error)
    else:
        if isinstance(place, Waiting):
            return place
        owner.placed(place)
    return None


class Dispatcher(Protocol[JobT, PlaceT]):
    """Finds instances for requests, and receives their outcomes."""

    def describe(
        self, inbound: Inbound, client: Client, parsed: ParsedRequest, counted: int | None
    ) -> JobT:
        """Describe a request for the scheduler, and charge its client.

        Raises:
            Refusal: 403 for what the client may not use, 429 for more than its limits.
        """
        ...

    def submit(
        self,
        job: JobT,
        tried: Sequence[InstanceId],
        failure: InstanceError | None,
        deadline_s: float,
        owner: Owner[PlaceT],
    ) -> PlaceT | Reject | Waiting:
        """Ask for a place.

        Args:
            tried: instances the request was on before.
            failure: of the last attempt, if there was one.
            deadline_s: monotonic; of the whole request.
            owner: is called back if a ``Waiting`` is returned.

        Raises:
            Refusal: 429 for a full queue.
        """
        ...

    def has_other(self, job: JobT, tried: Sequence[InstanceId]) -> bool:
        """Whether an untried instance could take a request that has a place."""
        ...

    def stream_began(self, job: JobT, place: PlaceT, stream: ObservedResponse) -> None:
        """The first bytes of a good stream are here."""
        ...

    async def spend(self, job: JobT, tokens: int) -> None:
        """A session continues: charge its client for all of its tokens so far.

        Raises:
            Refusal: 429 beyond the client's limits; the last tokens are not charged.
        """
        ...

    def made(self, job: JobT, place: PlaceT, name: bytes) -> None:
        """Its answer is a response that others may continue (``Intake.response_name``)."""
        ...

    def settle(
        self, job: JobT, place: PlaceT, seen: ObservedResponse, outcome: Outcome, *, final: bool
    ) -> None:
        """Settle the attempt: take it off its instance and count it. Once for each place."""
        ...

    def fall_back(self, job: JobT, model: str) -> None:
        """Nothing can take it: it is for another model from now on."""
        ...

    def settle_outside(
        self, job: JobT, label: str, seen: ObservedResponse, outcome: Outcome, *, final: bool
    ) -> None:
        """Settle an attempt at a service elsewhere; ``label``: of the fallback."""
        ...

    def withdraw(self, place: PlaceT, seen: ObservedResponse | None) -> None:
        """Take off an attempt that met a bug here; nothing is counted."""
        ...

    def pass_on(
        self, job: JobT, place: PlaceT, seen: ObservedResponse, outcome: Outcome = COMPLETED
    ) -> None:
        """Give the client the answer of an attempt that was settled as not final."""
        ...

    def note(self, job: JobT | None, outcome: str) -> None:
        """Count a request that reached no instance; None: it was not even read."""
        ...
