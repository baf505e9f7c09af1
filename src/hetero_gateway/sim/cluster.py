"""A cluster in virtual time: the gateway's scheduler in front of simulated instances.

``simulate`` drives the gateway's own scheduler, ledger, policies and predictors, and the engines of
``kernel.py``. It takes the place of the gateway's shell, and feeds the scheduler the same events in
order of time:

    arrival        predict, submit, pump
    first token    first_token, pump
    finish         observe the length, settle, pump
    tick           observe_steps, exact, for every instance that decoded since the last one
    fault          an instance is replaced by an unavailable one, and back; or its steps stretch
    wake-up        pump, when the scheduler asked for it

External events (fault, arrival, tick) are in a heap by ``(time_s, kind, sequence)``; the engines'
own, in their tournament. At one time, steps end first, then external events happen, then steps
begin. All endings at one time are reported before one pump. While nothing is queued in the
scheduler, no engine event can change a placement, so the engines run up to the next external event
in one call; otherwise they stop at the first event to report.

A request that an instance could never finish, because its cache is too small, is refused by it,
as vLLM refuses one longer than max_model_len. Memory holds a few arrays by request and a few
objects for each open request; events are not kept.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray, Integers
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.pairs import Pairs
from hetero_gateway.core.lengths.predictors import LengthFeatures, OutputLengthPredictor
from hetero_gateway.core.policies.legs import RolePrice
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import (
    PREFILL,
    InstanceId,
    InstanceSpec,
    KvRole,
    Outcome,
    PrefixKeys,
    Reject,
    Usage,
)
from hetero_gateway.sim.compiled import cases
from hetero_gateway.sim.engine import DEFAULT_BLOCK_TOKENS, DEFAULT_MAX_BATCHED_TOKENS, Scheduling
from hetero_gateway.sim.fleet import EngineFleet
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.jit import compiled as jit_loop
from hetero_gateway.sim.kernel import FINISHED, FIRST, PREEMPTED
from hetero_gateway.sim.workload import Fault, FaultEvent, FaultKind, Workload, fault_events

# The kinds of external events; at one time they happen in this order.
_FAULT, _ARRIVAL, _FETCHED, _TICK = range(4)

# Loading numba and the compiled kernel takes as long as simulating this many requests without.
_WORTH_COMPILING = 50_000


@dataclass(frozen=True, slots=True)
class SimulatedInstance:
    """One instance of a simulated cluster.

    Args:
        instance_id: unique in the cluster.
        profile: its engine's true behaviour.
        believed: the scheduler's profile of it; None: it is unprofiled.
        weight: as ``InstanceSpec``.
        prefix_caching: whether its engine keeps computed blocks.
        kv_role: which legs it may serve, as ``InstanceSpec``.
    """

    instance_id: InstanceId
    profile: Profile
    believed: Profile | None
    weight: float = 1.0
    prefix_caching: bool = True
    kv_role: KvRole = "both"


@dataclass(frozen=True, slots=True)
class Records:
    """The outcome of every request; arrays of shape (N,), in the workload's order.

    ``instance``: index of the (last) one it was placed on; -1: never placed. ``placed_s``: when
    it was; nan: never. ``first_token_s``: nan: none. ``finish_s``: nan if it was refused, or lost
    in mid-stream with a dead instance. ``preemptions``: how often an engine evicted it.
    ``cached_tokens``: of its prompt, those in its engine's prefix cache. ``split``: 1 if
    another instance computed its prompt.
    """

    instance: Integers
    placed_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    preemptions: Integers
    cached_tokens: Integers
    split: Integers

    @classmethod
    def empty(cls, size: int) -> Self:
        """Initial records, without outcomes."""
        times_s = (np.full(size, math.nan) for _ in range(3))
        counts = (np.zeros(size, np.int64) for _ in range(3))
        return cls(np.full(size, -1, np.int64), *times_s, *counts)


def simulate(
    instances: Sequence[SimulatedInstance],
    workload: Workload,
    scheduler: Scheduler,
    predictor: OutputLengthPredictor,
    *,
    model: str = "model",
    faults: Sequence[Fault] = (),
    scheduling: Scheduling = "chunked",
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    predictions: FloatArray | None = None,
    observe_interval_s: float = 1.0,
    compiled: bool | None = None,
    watch: Callable[[EngineFleet], None] = lambda fleet: None,
    pairs: Pairs | None = None,
    roles: Mapping[InstanceId, RolePrice] | None = None,
) -> Records:
    """Run a workload to its end, or until nothing can happen any more.

    Args:
        instances: at least one.
        scheduler: an empty one, policy and rng set; the instances are added to it. Anything
            with the same calls may replace it, such as several gateways
            (``benchmarks/scheduling/several_gateways.py``).
        predictor: predicts output lengths, and learns from those that finish.
        model: the name that requests ask for and all instances serve.
        predictions: (N,), output tokens, replacing the predictor's: for example, the true
            lengths.
        observe_interval_s: time between two ticks, above 0.
        compiled: run the engines compiled by numba; and if ``compiled/cases.py`` covers the
            case, the whole loop, without the scheduler and the predictor: they keep their state,
            except their generators. None: if it is installed and the workload is long enough to be
            worth it. The records are the same.
        watch: is given the engines before they run: data that no gateway sees, for comparisons.
        pairs: who can hand prompts over to whom, and how fast: the scheduler is told, and the
            transfers take as long. The loop of these is never compiled.
        roles: passed to the scheduler; ignored without ``pairs``.

    Raises:
        ValueError: a profile that no engine can run; see ``Engine``. Or instances that die,
            with pairs.
    """
    if pairs is not None and any(fault.kind is not FaultKind.SLOW for fault in faults):
        raise ValueError("instances that hand prompts over cannot die in a simulation")
    if compiled is None:
        compiled = len(workload.arrival_s) >= _WORTH_COMPILING and can_compile()
    prefixes = workload.prefixes
    fleet = EngineFleet(
        [instance.profile for instance in instances],
        scheduling=scheduling,
        max_batched_tokens=max_batched_tokens,
        compiled=compiled,
        prefix_caching=[i.prefix_caching and prefixes is not None for i in instances],
        most_blocks=0 if prefixes is None else prefixes.most_tokens // DEFAULT_BLOCK_TOKENS + 1,
    )
    watch(fleet)
    run = _Run(instances, workload, scheduler, predictor, fleet, model, predictions, pairs, roles)
    if compiled and pairs is None:
        arrays = cases.covered(
            scheduler, predictor, fleet, model, workload, faults, predictions, observe_interval_s,
            run.records,
        )  # fmt: skip
        if arrays is not None:
            arrays(jit_loop)
            return with_first_token_s(run.records, [i.profile for i in instances])
    records = run.to_the_end(faults, observe_interval_s)
    return with_first_token_s(records, [i.profile for i in instances])


def with_first_token_s(records: Records, profiles: Sequence[Profile]) -> Records:
    """Later by each profile's ``first_token_s``, which comes before all steps of a request.

    All of an instance's requests reach its engine later by the same time, so everything it does
    is later by that. The scheduler was told earlier times: so much sooner than over HTTP.
    """
    more_s = np.array([profile.first_token_s for profile in profiles])
    if not more_s.any():
        return records
    added_s = np.where(records.instance >= 0, more_s[records.instance], 0.0)
    return dataclasses.replace(
        records,
        first_token_s=records.first_token_s + added_s,
        finish_s=records.finish_s + added_s,
    )


class _Run:
    """The state of one simulation."""

    def __init__(
        self,
        instances: Sequence[SimulatedInstance],
        workload: Workload,
        scheduler: Scheduler,
        predictor: OutputLengthPredictor,
        fleet: EngineFleet,
        model: str,
        predictions: FloatArray | None,
        pairs: Pairs | None,
        roles: Mapping[InstanceId, RolePrice] | None,
    ) -> None:
        size = len(workload.arrival_s)
        self._scheduler = scheduler
        self._predictor = predictor
        self._fleet = fleet
        self._model = model
        self._positions = {instance.instance_id: i for i, instance in enumerate(instances)}
        self._specs = [
            InstanceSpec(
                instance.instance_id,
                frozenset({model}),
                instance.believed,
                weight=instance.weight,
                kv_role=instance.kv_role,
            )
            for instance in instances
        ]
        for spec, instance in zip(self._specs, instances, strict=True):
            scheduler.add(spec)
            if workload.prefixes is not None:
                scheduler.observe_cache(spec.instance_id, instance.prefix_caching, None, 0.0)
        self.records = Records.empty(size)
        # Reading and writing single numbers of an array goes faster through a memoryview.
        told = workload.arrival_s, workload.prompt_tokens, workload.output_tokens
        self._arrival_s, self._prompt_tokens, self._output_tokens = map(_view, told)
        self._predictions = None if predictions is None else _view(predictions)
        (
            self._instance, self._placed_s, self._first_token_s,
            self._finish_s, self._preemptions, self._cached_tokens, self._split,
        ) = (_view(getattr(self.records, field)) for field in Records.__slots__)  # fmt: skip
        self._prefixes = workload.prefixes
        self._classes = workload.classes
        # Transfers: when each direction of each instance's link is free, s, and those in progress.
        self._pairs = pairs
        self._out_s = [0.0] * len(instances)
        self._in_s = [0.0] * len(instances)
        self._transfers: dict[int, tuple[Ticket, int]] = {}
        self._tickets: dict[int, Ticket] = {}  # of prefill legs, by slot
        self._links = {}
        if pairs is not None:
            scheduler.legs.set_roles(roles, pairs)
            # As given: what the scheduler learns of them does not change their speed.
            for pair in itertools.permutations(self._positions, 2):
                if (link := pairs.link(*pair, -math.inf)) is not None:
                    self._links[pair] = link
        # By the fleet's slot: its request.
        self._requests: list[int] = []
        self._dispatches: list[Dispatch | None] = []
        self._in_flight = 0
        self._now_s = 0.0
        self._events: list[tuple[float, int, int]] = []
        self._ticking = False
        self._tick = 0
        self._told_steps = [0] * len(instances)
        self._told_s = [0.0] * len(instances)

    def to_the_end(self, faults: Sequence[Fault], interval_s: float) -> Records:
        events, scheduler, fleet = self._events, self._scheduler, self._fleet
        arrival_s = self._arrival_s
        changes = fault_events(faults)
        events += [(change.at_s, _FAULT, i) for i, change in enumerate(changes)]
        if len(arrival_s):
            events.append((arrival_s[0], _ARRIVAL, 0))
        heapq.heapify(events)
        while True:
            if self._in_flight and not self._ticking:
                self._ticking = True
                # At least the one after the last, however the division is rounded.
                self._tick = max(self._tick, math.floor(self._now_s / interval_s)) + 1
                heapq.heappush(events, (self._tick * interval_s, _TICK, self._tick))
            until_s = events[0][0] if events else math.inf
            waking = False
            if scheduler.queued:
                wake_s = scheduler.next_wakeup_s()
                if wake_s is not None and self._now_s < wake_s < until_s:
                    until_s, waking = wake_s, True
            if until_s == math.inf:
                return self.records
            complete = fleet.advance(until_s, scheduler.queued > 0 or self._pairs is not None)
            if fleet.log[0]:
                self._tell()
            # A transfer begun just now may arrive before anything else happens.
            if not complete or (events and events[0][0] < until_s):
                continue
            self._now_s = until_s
            if waking:
                self._pump()
                continue
            _, kind, sequence = events[0]
            if kind == _ARRIVAL:
                following = sequence + 1
                if following < len(arrival_s):
                    heapq.heapreplace(events, (arrival_s[following], _ARRIVAL, following))
                else:
                    heapq.heappop(events)
                self._arrive(sequence)
            elif kind == _FETCHED:
                heapq.heappop(events)
                self._fetched(sequence)
            elif kind == _TICK:
                heapq.heappop(events)
                self._ticking = False
                self._observe_steps()
            else:
                heapq.heappop(events)
                self._change(changes[sequence])

    # -- requests

    def _arrive(self, request: int) -> None:
        if self._submit(request, first=False):
            self._pump()

    def _submit(self, request: int, *, first: bool) -> bool:
        prompt_tokens = self._prompt_tokens[request]
        if self._predictions is None:
            predicted = self._predictor.predict(self._features(request))
        else:
            predicted = self._predictions[request]
        asked = Request(self._model, prompt_tokens, predicted, prefix=self._keys(request))
        if self._classes:
            asked = asked.replace(request_class=self._classes[request])
        ticket = self._scheduler.place(
            asked, self._now_s, owner=request, first=first, at_once=False
        )
        return not isinstance(ticket, Reject)

    def _keys(self, request: int) -> PrefixKeys | None:
        """The prompt's keys, as the scheduler knows them."""
        if self._prefixes is None or self._scheduler.caches is None:
            return None
        return self._prefixes.gateway_keys(request)

    def _features(self, request: int) -> LengthFeatures:
        """Its properties known before it is answered."""
        keys = self._keys(request)
        beginning = keys.hashes[0] if keys is not None and keys.hashes else None
        return LengthFeatures(self._model, self._prompt_tokens[request], beginning=beginning)

    def _pump(self) -> None:
        # A refusal makes room for another.
        tickets = self._scheduler.pump(self._now_s)
        while tickets:
            refused = 0
            for ticket in tickets:
                if ticket.dispatch is not None and not self._start(ticket, ticket.dispatch):
                    refused += 1
            if not refused or not self._scheduler.queued:
                return
            tickets = self._scheduler.pump(self._now_s)

    def _start(self, ticket: Ticket, dispatch: Dispatch) -> bool:
        """Put a placed request into its instance's engine; False if it refuses."""
        request: int = ticket.owner
        position = self._positions[dispatch.instance_id]
        self._instance[request] = position
        self._placed_s[request] = self._now_s
        prompt_tokens, output_tokens = self._prompt_tokens[request], self._output_tokens[request]
        if prompt_tokens + output_tokens - 1 > self._fleet.capacity_tokens[position]:
            self._scheduler.settle(dispatch, Outcome.UPSTREAM_ERROR, self._now_s)
            return False
        if ticket.prefill is not None:
            self._split[request] = 1
            self._start_prefill(ticket, ticket.prefill)
            return True
        self._occupy(request, dispatch, position, output_tokens)
        return True

    def _occupy(
        self, request: int, dispatch: Dispatch, position: int, output_tokens: int, **leg: Any
    ) -> int:
        """Give an engine a sequence; returns its slot."""
        slot = self._fleet.new_slot()
        if slot >= len(self._requests):
            more = slot + 1 - len(self._requests)
            self._requests.extend([-1] * more)
            self._dispatches.extend([None] * more)
        self._requests[slot] = request
        self._dispatches[slot] = dispatch
        self._in_flight += 1
        keys: Any = ()
        if self._prefixes is not None:
            keys = self._prefixes.engine_keys(request, DEFAULT_BLOCK_TOKENS)
            keys = keys if self._fleet.compiled else keys.tolist()
        prompt_tokens = self._prompt_tokens[request]
        self._fleet.submit(position, slot, prompt_tokens, output_tokens, self._now_s, keys, **leg)
        return slot

    # -- legs

    def _start_prefill(self, ticket: Ticket, prefill: Dispatch) -> None:
        position = self._positions[prefill.instance_id]
        slot = self._occupy(ticket.owner, prefill, position, 1, pins=True)
        self._tickets[slot] = ticket

    def _hand_over(self, slot: int, at_s: float) -> None:
        """A prompt is computed: its KV goes over both links, one transfer after the other.

        Its server began it, as all that comes there, later than its engine here: what it has
        computed can be fetched so much later (``with_first_token_s`` adds the other server's part).
        """
        ticket = self._tickets.pop(slot)
        prefill, dispatch, pairs = ticket.prefill, ticket.dispatch, self._pairs
        assert prefill is not None
        assert dispatch is not None
        assert pairs is not None
        self._scheduler.legs.prefilled(prefill, at_s)
        one, other = (self._positions[d.instance_id] for d in (prefill, dispatch))
        at_s += self._fleet.profiles[one].first_token_s
        link = self._links[prefill.instance_id, dispatch.instance_id]
        size_bytes = self._prompt_tokens[ticket.owner] * pairs.kv_bytes_per_token
        end_s = max(at_s, self._out_s[one], self._in_s[other]) + link.takes_s(size_bytes)
        self._out_s[one] = self._in_s[other] = end_s
        self._transfers[slot] = ticket, one
        heapq.heappush(self._events, (end_s, _FETCHED, slot))

    def _fetched(self, slot: int) -> None:
        """A prompt's KV has arrived: the receiver continues, and the sender has room again."""
        ticket, one = self._transfers.pop(slot)
        prefill, dispatch, request = ticket.prefill, ticket.dispatch, ticket.owner
        assert prefill is not None
        assert dispatch is not None
        self._fleet.unpin(one, slot, self._now_s)
        self._scheduler.settle(prefill, Outcome.COMPLETED, self._now_s)
        self._release(slot)
        position = self._positions[dispatch.instance_id]
        tokens = self._prompt_tokens[request] - 1
        self._occupy(request, dispatch, position, self._output_tokens[request], fetched=tokens)
        if self._scheduler.queued:
            self._pump()

    def _tell(self) -> None:
        """Report the engines' logged events."""
        log, log_s, scheduler = self._fleet.log, self._fleet.log_s, self._scheduler
        for k in range(1, 1 + log[0]):
            slot, kind = log[k] >> 2, log[k] & 3
            request, dispatch = self._requests[slot], self._dispatches[slot]
            assert dispatch is not None
            if dispatch.leg is PREFILL:
                if kind == FINISHED:
                    self._hand_over(slot, log_s[k])
                elif kind == PREEMPTED:
                    self._preemptions[request] += 1
            elif kind == FIRST:
                self._first_token_s[request] = log_s[k]
                scheduler.first_token(dispatch, log_s[k])
            elif kind == FINISHED:
                self._finish_s[request] = log_s[k]
                output_tokens = self._output_tokens[request]
                usage = None
                if self._prefixes is not None:
                    cached_tokens = self._cached_tokens[request] = self._fleet.cached_tokens(slot)
                    usage = Usage(self._prompt_tokens[request], output_tokens, cached_tokens)
                self._predictor.observe(self._features(request), output_tokens)
                scheduler.residual.observe(self._model, output_tokens)
                scheduler.settle(dispatch, Outcome.COMPLETED, log_s[k], usage)
                self._release(slot)
            elif kind == PREEMPTED:
                self._preemptions[request] += 1
        if scheduler.queued:
            self._now_s = log_s[log[0]]
            self._pump()

    def _release(self, slot: int) -> None:
        self._dispatches[slot] = None
        self._fleet.free_slots.append(slot)
        self._in_flight -= 1

    # -- instances

    def _observe_steps(self) -> None:
        steps, seconds = self._fleet.decoded(self._now_s)
        for i, spec in enumerate(self._specs):
            made = steps[i] - self._told_steps[i]
            if made > 0:
                took_s = seconds[i] - self._told_s[i]
                self._scheduler.members.observe_steps(spec.instance_id, made, took_s, self._now_s)
        self._told_steps, self._told_s = steps, seconds

    def _change(self, event: FaultEvent) -> None:
        i = event.fault.instance
        if event.fault.kind is FaultKind.SLOW:
            self._fleet.set_slowdown(i, math.prod(event.holding), self._now_s)
            return
        self._scheduler.replace(dataclasses.replace(self._specs[i], available=not event.holding))
        if event.begins:
            self._lose_all(i)
        self._pump()

    def _lose_all(self, i: int) -> None:
        """The instance is gone. Requests without a first token are retried elsewhere, oldest
        first."""
        again = []
        for slot, dispatch in enumerate(self._dispatches):
            if dispatch is None or self._instance[self._requests[slot]] != i:
                continue
            self._scheduler.settle(dispatch, Outcome.UPSTREAM_ERROR, self._now_s)
            if math.isnan(self._first_token_s[self._requests[slot]]):
                again.append(self._requests[slot])
            self._release(slot)
        self._fleet.clear(i)
        self._told_steps[i], self._told_s[i] = 0, 0.0
        for request in sorted(again, reverse=True):
            self._submit(request, first=True)


def _view(array: Any) -> Any:
    contiguous: Any = np.ascontiguousarray(array)
    return memoryview(contiguous)
