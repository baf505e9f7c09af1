"""Which lines are sent where now: as many as other requests leave room for."""

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hetero_gateway.core.batches.others import InstanceCounts, Others
from hetero_gateway.core.batches.outlook import LineLengths, Sums
from hetero_gateway.core.batches.shares import (
    BatchShare,
    alone_s,
    done_in_s,
    most_there,
    shares,
    step_s,
)
from hetero_gateway.core.policies.estimates import LATE_S, PREFILL_TOKENS, room
from hetero_gateway.core.policies.finish_time import DRAIN_FACTOR, drain_s
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.pool import Pool
from hetero_gateway.core.types import InstanceId, Reject
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.dataplane.intake import Placed
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.serve.batches.ledger import Batch, WaitingLine

# Bytes of bodies being sent at a time, besides the first one.
_MOST_BYTES = 16 << 20
# Lines may use one part in this many of a key's own limits.
_OURS = 2
_MODELS_LOOKED_AT = 64
# Weight of one look in the average of what batches have of an instance: about two minutes.
_LOOK_WEIGHT = 1 / 120
_USUAL = (512.0, 256.0)


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch whose lines are being sent.

    ``held``: by model, the next waiting lines; ``out``: number of lines sent and unanswered, by
    instance. ``moved_s``: by model, when lines were last fetched or sent; ``rests_s``: no lines
    are fetched before; ``again_s``: it does not end before, since other gateways have lines of
    it. All monotonic.
    """

    batch: Batch
    seen: LineLengths = field(default_factory=LineLengths)
    held: defaultdict[str, deque[WaitingLine]] = field(default_factory=lambda: defaultdict(deque))
    out: Counter[InstanceId] = field(default_factory=Counter)
    moved_s: dict[str, float] = field(default_factory=dict)
    rests_s: dict[str, float] = field(default_factory=dict)
    again_s: float = 0.0

    @property
    def lines_out(self) -> int:
        return sum(self.out.values())


class AskedThere(NamedTuple):
    """A gateway's load on an engine: unanswered lines, and ``InstanceCounts``."""

    lines_out: int
    sent: int
    answered: int
    prompt_tokens: int
    output_tokens: int
    there: int


# Of a gateway, by the engines' addresses.
Told = dict[str, AskedThere]


class Pick(NamedTuple):
    """A line, and its destination."""

    line: WaitingLine
    at: InstanceId


@dataclass(slots=True)
class _Load:
    """Lines picked for an instance in this turn, not sent yet."""

    lines: int = 0
    prompt_tokens: int = 0
    tokens: int = 0


class LineChoice:
    """Chooses lines.

    Args:
        fleet: the instances.
        metrics: counts all requests.
        slowdown: by what factor other requests may become slower.
        target: the model that a name stands for.

    ``sent``, ``answered``, ``prompt_tokens``, ``output_tokens``: of lines, by instance; counted
    by the sender. ``out``: unanswered lines. ``bytes_out``: of their bodies.
    """

    def __init__(
        self, fleet: Fleet, metrics: Metrics, slowdown: float, target: Callable[[str], str]
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._slowdown = slowdown
        self._target = target
        self._others = Others()
        self._shares: dict[str, tuple[Pool, list[BatchShare]]] = {}
        # By model: the recent share of batches at each instance.
        self._usual_parts: dict[str, dict[InstanceId, float]] = {}
        self.sent: Counter[InstanceId] = Counter()
        self.answered: Counter[InstanceId] = Counter()
        self.prompt_tokens: Counter[InstanceId] = Counter()
        self.output_tokens: Counter[InstanceId] = Counter()
        self.out: Counter[InstanceId] = Counter()
        self.bytes_out = 0
        self._counts: dict[InstanceId, InstanceCounts] = {}
        # Other gateways by name: their first and their latest report.
        self._first: dict[str, Told] = {}
        self._last: dict[str, Told] = {}
        self._elsewhere: Counter[str] = Counter()  # their lines, by engine address

    def told(self) -> Told:
        """The report to other gateways."""
        instances = self._fleet.instances
        return {
            instances[each].config.base_url: AskedThere(self.out[each], *counts)
            for each, counts in self._counts.items()
            if each in instances
        }

    def hear(self, told: Mapping[str, Told]) -> None:
        """Take in the reports of all other gateways present, by name."""
        self._first = {name: said | self._first.get(name, {}) for name, said in told.items()}
        self._last = dict(told)
        self._elsewhere.clear()
        for said in told.values():
            for url, asked in said.items():
                self._elsewhere[url] += asked.lines_out

    @property
    def lines_elsewhere(self) -> int:
        """Unanswered lines of other gateways."""
        return self._elsewhere.total()

    def _with_others(self, url: str, counts: InstanceCounts) -> InstanceCounts:
        """Counts including what they have asked since their first report."""
        for name, said in self._last.items():
            if (now := said.get(url)) is not None:
                first = self._first[name][url]
                since = [a - b for a, b in zip(now[1:-1], first[1:-1], strict=True)]
                since.append(now.there)
                counts = InstanceCounts(*(a + b for a, b in zip(counts, since, strict=True)))
        return counts

    def placed(self, at: InstanceId) -> None:
        """A line is sent there."""
        self.sent[at] += 1

    def note(self, at: InstanceId, prompt_tokens: int, output_tokens: int) -> None:
        """A line was answered there."""
        self.answered[at] += 1
        self.prompt_tokens[at] += prompt_tokens
        self.output_tokens[at] += output_tokens

    def look(self, now_s: float) -> None:
        """Measure other requests' load; to be called about once a second."""
        metrics, table = self._metrics, self._fleet.scheduler.members.table
        metrics.catch_up()
        sums: dict[str, list[int]] = {}
        for (_, instance_id), series in metrics.every_series.items():
            each = sums.setdefault(instance_id, [0, 0, 0])
            each[0] += series.outcomes.get("completed", 0)
            each[1] += series.input_tokens
            each[2] += series.output_tokens
        counts = {}
        for instance_id in self._fleet.instances:
            answered, prompt, output = sums.get(instance_id, (0, 0, 0))
            counts[instance_id] = InstanceCounts(
                metrics.decisions.get(instance_id, 0) - self.sent[instance_id],
                answered - self.answered[instance_id],
                prompt - self.prompt_tokens[instance_id],
                output - self.output_tokens[instance_id],
                max(0, table[instance_id].in_flight - self.out[instance_id]),
            )
        self._counts = counts
        if self._last:
            instances = self._fleet.instances
            counts = {
                each: self._with_others(instances[each].config.base_url, own)
                for each, own in counts.items()
            }
        self._others.look(counts, now_s)
        self._shares.clear()

    def pool(self, model: str) -> Pool:
        return self._fleet.scheduler.members.pool(self._target(model))

    def shares(self, pool: Pool, model: str, now_s: float) -> list[BatchShare]:
        """The share of batches at each instance of a pool, in its order."""
        known = self._shares.get(model)
        if known is None or known[0] is not pool:
            others = self._others.on(pool.ids, now_s)
            known = pool, shares(pool.states, pool.members, others, self._slowdown)
            self._shares[model] = known
            if others.rate_per_s < math.inf:
                before = self._usual_parts.get(model, {})
                self._usual_parts[model] = {
                    each: _moved(before.get(each), 1.0 if share.given else share.part)
                    for each, share in zip(pool.ids, known[1], strict=True)
                }
        return known[1]

    def work_s(self, model: str, prompt_tokens: float, output_tokens: float, now_s: float) -> float:
        """How long such a line occupies the share that batches have of all instances together, s.

        Each instance at its fullest; all of each, if batches had no share.
        """
        pool = self.pool(model)
        self.shares(pool, model, now_s)
        parts = self._usual_parts.get(model, {})
        times_s = pool.request_times_s(prompt_tokens, max(1.0, output_tokens))
        per_s = [1 / max(1e-9, time_s) for time_s in times_s]
        ours = sum(each * parts.get(i, 0.0) for i, each in zip(pool.ids, per_s, strict=True))
        return 1 / (ours or sum(per_s)) if per_s else 0.0

    def step_s(self, at: InstanceId, lines: float) -> float:
        """A step's duration at an instance with so many lines, besides its other requests."""
        if at not in self._fleet.instances:
            return 0.0
        state = self._fleet.scheduler.members.table[at]
        return step_s(state, max(0, state.in_flight - self.out[at]), lines)

    def made_tokens(self, placed: Placed, now_s: float) -> float:
        """Estimated tokens of an unfinished answer, by its instance's step clock."""
        if placed.instance.id not in self._fleet.instances:
            return 0.0
        state = self._fleet.scheduler.members.table[placed.instance.id]
        return state.made_tokens(placed.dispatch, now_s)

    def pick(
        self,
        running: Sequence[RunningBatch],
        retries: Iterable[WaitingLine],
        depth: int,
        may_spend: Callable[[Batch, int], bool],
        now_s: float,
    ) -> list[Pick]:
        """The lines to send now; they are removed from ``held``.

        Args:
            running: the batches, in order of precedence.
            retries: lines to send again, before all others of their batch.
            depth: how many sequences without a first token an instance may have.
            may_spend: whether the batch's key has room for a line of so many tokens.
        """
        scheduler = self._fleet.scheduler
        if not scheduler.queued:
            scheduler.pump(now_s)  # assume unseen first tokens at their predicted times
        elif self.out.total():
            return []
        lengths = {each.batch.seq: each.seen for each in running}
        turn = _Turn(depth, may_spend, now_s, self.bytes_out, lengths)
        again: dict[tuple[int, str], deque[WaitingLine]] = {}
        for line in retries:
            again.setdefault((line.batch.seq, line.model), deque()).append(line)
        models = dict.fromkeys(model for _, model in again)
        for each in running:
            models |= dict.fromkeys(model for model, lines in each.held.items() if lines)
        for model in list(models)[:_MODELS_LOOKED_AT]:
            pool = self.pool(model)
            if not pool.ids:
                continue
            queues: list[deque[WaitingLine]] = []
            waiting = 0
            for each in running:
                first = again.get((each.batch.seq, model), deque())
                queues += (first, each.held[model])
                waiting += len(first) + each.batch.waiting.get(model, 0)
            told = self.shares(pool, model, now_s)
            for i in self._order(pool, told):
                self._fill(turn, pool, i, told, queues, waiting)
        return turn.picks

    def _order(self, pool: Pool, told: Sequence[BatchShare]) -> list[int]:
        """Slow machines first, preferred ones before the others."""
        slow = [alone_s(s, m, *_USUAL) for s, m in zip(pool.states, pool.members, strict=True)]
        return sorted(range(len(slow)), key=lambda i: (not told[i].given, -slow[i]))

    def _fill(
        self,
        turn: "_Turn",
        pool: Pool,
        i: int,
        told: Sequence[BatchShare],
        queues: Sequence[deque[WaitingLine]],
        waiting: int,
    ) -> None:
        """Give an instance its share. ``waiting``: lines of the model, without those out."""
        load = turn.loads.setdefault(pool.ids[i], _Load())
        for queue in queues:
            while queue:
                line = queue[0]
                alone = not (turn.picks or self.out.total())
                if not alone and turn.bytes_out + line.size > _MOST_BYTES:
                    return
                if not _fits(pool, i, line):
                    break
                output = turn.output_of(line)
                if not self._has_room(turn, pool, i, told[i], line, output, alone=alone):
                    return
                if _ends_late(pool, i, told, line, output, waiting - len(turn.picks)):
                    return
                tokens = line.prompt_tokens + round(output)
                if not turn.may_spend(line.batch, tokens):
                    break
                queue.popleft()
                turn.picks.append(Pick(line, pool.ids[i]))
                turn.bytes_out += line.size
                load.lines += 1
                load.prompt_tokens += line.prompt_tokens
                load.tokens += tokens

    def _has_room(
        self,
        turn: "_Turn",
        pool: Pool,
        i: int,
        share: BatchShare,
        line: WaitingLine,
        output: float,
        *,
        alone: bool,
    ) -> bool:
        state, member, load = pool.states[i], pool.members[i], turn.loads[pool.ids[i]]
        prompt = float(line.prompt_tokens)
        elsewhere = 0
        if self._elsewhere:
            elsewhere = self._elsewhere[self._fleet.instances[pool.ids[i]].config.base_url]
        waiting = state.waiting + state.peers.waiting + load.lines
        # Of gateways that do not share their load, only the lines are known.
        theirs = max(state.peers.streaming, elsewhere - state.peers.waiting)
        there = waiting + state.streaming + theirs
        if there >= min(member.seats, state.seats):
            return False
        needed = prompt + load.prompt_tokens
        grown = prompt + output + load.tokens
        if not room(state, member, needed, grown, turn.depth, turn.now_s)[1]:
            return False
        tokens = state.waiting_prefill + load.prompt_tokens
        short = tokens < PREFILL_TOKENS and state.speed * member.p1 * tokens < LATE_S
        if waiting >= turn.depth and not short:
            return False
        ours = self.out[pool.ids[i]] + load.lines + elsewhere
        return alone or ours + 1 <= most_there(share, state, member, prompt, output)


@dataclass(slots=True)
class _Turn:
    """One look at all lines that may be sent."""

    depth: int
    may_spend: Callable[[Batch, int], bool]
    now_s: float
    bytes_out: int
    lengths: dict[int, LineLengths]  # by batch
    picks: list[Pick] = field(default_factory=list)
    loads: dict[InstanceId, _Load] = field(default_factory=dict)

    def output_of(self, line: WaitingLine) -> float:
        """Expected tokens of an answer, from similar lines."""
        sums = Sums(1, line.prompt_tokens, line.output_tokens)
        return self.lengths[line.batch.seq].mean(line.kind, sums)[1]


def _moved(before: float | None, now: float) -> float:
    return now if before is None else before + _LOOK_WEIGHT * (now - before)


def _fits(pool: Pool, i: int, line: WaitingLine) -> bool:
    """Whether an instance can hold it; if none can, the engine should say so."""
    prompt, output = line.prompt_tokens, line.output_tokens
    if prompt < pool.shortest_context_tokens and prompt + output <= pool.smallest_capacity_tokens:
        return True
    eligible = pool.eligible(Request(line.model, prompt, float(output)))
    return isinstance(eligible, Reject) or eligible.has(i)


def _ends_late(
    pool: Pool, i: int, told: Sequence[BatchShare], line: WaitingLine, output: float, waiting: int
) -> bool:
    """The drain rule: whether a fast machine would finish it sooner, after all that wait."""
    if waiting > sum(member.seats for member in pool.members):
        return False
    lengths = float(line.prompt_tokens), output
    given = [j for j, share in enumerate(told) if share.given]
    if i not in given:
        return False
    states, members = [pool.states[j] for j in given], [pool.members[j] for j in given]
    soonest_s = min(done_in_s(s, m, *lengths) for s, m in zip(states, members, strict=True))
    takes_s = drain_s(states, members, lengths, waiting) / DRAIN_FACTOR["makespan"]
    return done_in_s(pool.states[i], pool.members[i], *lengths) > soonest_s + takes_s


class Spending:
    """How much lines may use of their keys' limits: half of each, in one turn.

    Args:
        client_of: a key's client; None: it is gone.
    """

    def __init__(self, client_of: Callable[[str], Client | None]) -> None:
        self._client_of = client_of
        # Lines and tokens of this turn, not charged yet.
        self._spent: dict[str, tuple[int, int]] = {}

    def may(self, batch: Batch, tokens: int) -> bool:
        """Whether a line of so many tokens may be sent; if so, it is counted."""
        client = self._client_of(batch.owner)
        if client is None:
            return False
        lines, before = self._spent.get(batch.owner, (0, 0))
        second = int(time.monotonic())
        for account in client.accounts:
            requests, used = account.requests, account.tokens
            for window, amount in ((requests, lines + 1), (used, before + tokens)):
                window.advance(second)
                # A line longer than that goes when nothing else was used.
                if window.limit is not None and (window.used or lines):
                    if window.free - amount < window.limit - window.limit // _OURS:
                        return False
            if account.concurrency is not None:
                there = account.in_flight + account.others_in_flight + lines
                if there >= max(1, account.concurrency // _OURS):
                    return False
        self._spent[batch.owner] = lines + 1, before + tokens
        return True
