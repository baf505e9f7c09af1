"""Two instances that nobody profiled, of different speed and slots, in a closed loop."""

import heapq
import itertools
from collections import deque

import numpy as np
import pytest

from hetero_gateway.core.instances.concurrency import Concurrency
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.types import InstanceId, Outcome
from tests.core.builders import scheduler, spec


class Engine:
    """Steps of one length; so many slots; a prefill takes as long as a step."""

    def __init__(self, step_s: float, slots: int) -> None:
        self.step_s = step_s
        self.slots = slots
        self.queue: deque[tuple[Ticket, int]] = deque()
        self.running: list[list[object]] = []  # [ticket, tokens to come, has begun]
        self.tokens = 0
        self.stepping = False


class Loop:
    """So many clients, each of which sends the next request when the last is done."""

    def __init__(self, engines: dict[str, Engine], clients: int, *, scrapes_s: float, seed: int):
        specs = [spec(name, None) for name in engines]
        self.scheduler = scheduler(*specs, policy="finish-time", seed=seed)
        self.engines = engines
        self.rng = np.random.default_rng(seed)
        self.clients = clients
        self.scrapes_s = scrapes_s
        self.events: list[tuple[float, int, str, str]] = []
        self.order = itertools.count()
        self.steps = dict.fromkeys(engines, 0)

    def at(self, when_s: float, kind: str, name: str = "") -> None:
        heapq.heappush(self.events, (when_s, next(self.order), kind, name))

    def run(self, until_s: float, counted_from_s: float) -> float:
        """Tokens per second from then on."""
        for i in range(self.clients):
            self.at(0.01 * i, "send")
        self.at(1.0, "look")
        if self.scrapes_s:
            self.at(self.scrapes_s, "scrape")
        counting = False
        while self.events[0][0] < until_s:
            now_s, _, kind, name = heapq.heappop(self.events)
            if not counting and now_s >= counted_from_s:
                counting = True
                for engine in self.engines.values():
                    engine.tokens = 0
            if kind == "send":
                body = Request("m", 100, 100.0)
                self.scheduler.place(
                    body, now_s, owner=1 + int(self.rng.exponential(100)), at_once=False
                )
            elif kind == "step":
                self.step(name, now_s)
            elif kind == "look":
                self.look(now_s)
            elif kind == "scrape":
                self.scrape(now_s)
            self.pump(now_s)
        return sum(e.tokens for e in self.engines.values()) / (until_s - counted_from_s)

    def pump(self, now_s: float) -> None:
        for ticket in self.scheduler.pump(now_s):
            assert ticket.dispatch is not None, ticket
            name = ticket.dispatch.instance_id
            engine = self.engines[name]
            engine.queue.append((ticket, ticket.owner))
            if not engine.stepping:
                engine.stepping = True
                self.at(now_s + engine.step_s, "step", name)

    def step(self, name: str, now_s: float) -> None:
        engine = self.engines[name]
        self.steps[name] += bool(engine.running)
        for row in list(engine.running):
            ticket, left, begun = row
            assert isinstance(left, int)
            assert ticket.dispatch is not None
            if not begun:
                self.scheduler.first_token(ticket.dispatch, now_s)
            row[1], row[2] = left - 1, True
            engine.tokens += 1
            if left <= 1:
                engine.running.remove(row)
                self.scheduler.settle(ticket.dispatch, Outcome.COMPLETED, now_s)
                self.at(now_s + 0.001, "send")
        while engine.queue and len(engine.running) < engine.slots:
            ticket, tokens = engine.queue.popleft()
            engine.running.append([ticket, tokens, False])
        engine.stepping = bool(engine.running)
        if engine.stepping:
            self.at(now_s + engine.step_s, "step", name)

    def look(self, now_s: float) -> None:
        for name in self.engines:
            made, self.steps[name] = self.steps[name], 0
            if made:
                self.scheduler.members.observe_steps(InstanceId(name), made, 1.0, now_s)
        self.at(now_s + 1.0, "look")

    def scrape(self, now_s: float) -> None:
        for name, engine in self.engines.items():
            running, waiting = len(engine.running), len(engine.queue)
            self.scheduler.members.table[InstanceId(name)].observe_queue(running, waiting, now_s)
        self.at(now_s + self.scrapes_s, "scrape")


def ideal(engines: dict[str, Engine], clients: int) -> float:
    """Tokens per second with the fastest slots taken first."""
    total, left = 0.0, clients
    for engine in sorted(engines.values(), key=lambda e: e.step_s):
        total += min(left, engine.slots) / engine.step_s
        left -= min(left, engine.slots)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("scrapes_s", [0.0, 5.0])
@pytest.mark.parametrize(
    ("clients", "slots", "least"),
    [
        (12, (8, 8), 0.95),
        (32, (8, 8), 0.95),
        (12, (8, 16), 0.95),
        (32, (8, 16), 0.95),
        (32, (16, 4), 0.95),
        # Where the fast one can hold them all, a request now and then finds out about the slow one.
        (12, (16, 4), 0.93),
    ],
)
def test_without_a_word_of_configuration_nearly_all_of_the_ideal(clients, slots, least, scrapes_s):
    shares = []
    for seed in range(2):
        engines = {"fast": Engine(0.01, slots[0]), "slow": Engine(0.04, slots[1])}
        loop = Loop(engines, clients, scrapes_s=scrapes_s, seed=seed)
        shares.append(loop.run(60.0, 15.0) / ideal(engines, clients))
    assert np.mean(shares) >= least


@pytest.mark.parametrize(
    ("steps_s", "clients", "after"),
    # Where all slots are taken, the next one is at hand as one ends.
    [((0.01, 0.04), 12, 0.97), ((0.01, 0.04), 32, 0.995), ((0.01, 0.03, 0.09), 32, 0.995)],
)
def test_it_learns_in_the_first_seconds(steps_s, clients, after) -> None:
    shares = []
    for from_s, until_s in ((0.0, 12.0), (12.0, 40.0)):
        engines = {str(step_s): Engine(step_s, 8) for step_s in steps_s}
        loop = Loop(engines, clients, scrapes_s=0.0, seed=0)
        shares.append(loop.run(until_s, from_s) / ideal(engines, clients))
    assert shares[0] >= 0.92
    assert shares[1] >= after


def test_an_engine_with_more_slots_than_were_learnt_gets_them_used() -> None:
    engines = {"fast": Engine(0.01, 4), "slow": Engine(0.04, 64)}
    loop = Loop(engines, 32, scrapes_s=0.0, seed=0)
    loop.run(20.0, 0.0)
    learnt = loop.scheduler.members.snapshot(InstanceId("fast")).learnt_max_num_seqs
    assert learnt <= 6
    engines["fast"].slots = 24
    loop.clients = 0
    rate = loop.run(140.0, 100.0)
    learnt = loop.scheduler.members.snapshot(InstanceId("fast")).learnt_max_num_seqs
    assert learnt >= 20
    assert rate >= 0.9 * ideal(engines, 32)


def test_what_is_seen_to_run_is_the_least_it_can_be() -> None:
    slots = Concurrency()
    slots.queues(3, 9, 12, 1.0)
    assert (slots.learnt, slots.most) == (3, 3)
    for running in range(4, 13):
        slots.began(running, 0.01, 100.0, 0.1, 0.0, 1.1)
    assert slots.learnt == 12
    assert slots.most >= 12


def test_slots_are_learnt_only_of_one_that_waited_for_another_s_end_and_twice() -> None:
    slots = Concurrency()
    for _ in range(5):
        slots.began(8, 5.0, 3.0, 0.1, 0.0, 1.0)  # late, but nobody had just ended
        slots.began(8, 0.05, 0.01, 0.1, 0.0, 1.0)  # one had, but it was not late
    assert slots.learnt is None
    slots.began(7, 2.0, 0.05, 0.1, 0.0, 2.0)
    assert slots.learnt is None
    slots.began(8, 2.0, 0.05, 0.1, 0.0, 2.1)
    assert slots.learnt == 8


def test_more_is_tried_more_seldom_where_it_fails() -> None:
    slots = Concurrency()
    slots.queues(8, 1, 9, 0.0)
    tried = []
    now_s = 0.0
    while len(tried) < 4:
        now_s += 0.5
        slots.let_pass(now_s)
        if slots.most > 8:
            tried.append(now_s)
            slots.queues(8, 1, 9, now_s)
            assert slots.most == 8
    gaps = np.diff(tried)
    assert all(later > earlier for earlier, later in itertools.pairwise(gaps))


def test_a_profiled_instance_is_taken_at_its_word() -> None:
    s = scheduler(spec("a"), policy="finish-time")
    s.members.table[InstanceId("a")].observe_queue(3, 100, 1.0)
    assert s.members.snapshot(InstanceId("a")).learnt_max_num_seqs is None
