"""``plan --watch GATEWAY``: instances to add, wake, put to sleep or drain as the load changes.

The same as the gateway's section ``following`` publishes, for setups without an autoscaler and
without that section: ``profiler.seen`` asks /admin, ``planner.following`` answers, and each change
of the answer is one line. The gateway is only read; nothing in it changes.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from hetero_gateway.cli import plan_again
from hetero_gateway.cli.plan_again import Replan
from hetero_gateway.errors import ConfigError, HeteroGatewayError
from hetero_gateway.lab.load.admin import fetch_document
from hetero_gateway.planner.following import (
    FleetChange,
    Follower,
    LoadSample,
    Proposal,
    ScaledType,
    Seat,
    Standing,
    changes,
)
from hetero_gateway.planner.held_rates import HeldRates, RateQuestion, find_held_rates, key_of
from hetero_gateway.planner.plan import Key

_LENGTHS = 1000
_LOOKS_BACK_S = 900.0
_STEP_S = 15.0


def run(args: argparse.Namespace, overrides: Mapping[str, Any], looks: int | None = None) -> int:
    """Look and print until Ctrl-C, or a number of times. ConfigError: a flag or file is wrong."""
    if args.from_gateway is not None or args.output is not None or args.report is not None:
        raise ConfigError("--watch: not together with --from-gateway, -o or --report")
    args.from_gateway = args.watch

    def sleeps(instance_id: str) -> bool:
        path = f"/admin/instances/{instance_id}/engine/is_sleeping"
        try:
            return "is_sleeping" in fetch_document(args.watch, args.admin_key_env, path, {})
        except HeteroGatewayError:
            return False  # vLLM has this path only in development mode

    watch = LoadWatch(lambda: plan_again.prepare(args, overrides), sleeps)
    shown: list[str] | None = None
    seen = 0
    try:
        while looks is None or seen < looks:
            if seen:
                time.sleep(args.interval)
            seen += 1
            try:
                found, proposal = watch.look(time.time())
            except ConfigError:
                if shown is None:
                    raise
                print("plan --watch: the file is wrong now; nothing changes", file=sys.stderr)
                continue
            except HeteroGatewayError as error:
                print(f"plan --watch: {error}", file=sys.stderr)
                continue
            words = [str(change) for change in found]
            if words != shown:
                shown = words
                print(_line(found, proposal, as_json=args.json), flush=True)
    except KeyboardInterrupt:
        return 0
    return 0


def _line(found: list[FleetChange], proposal: Proposal, *, as_json: bool) -> str:
    now = datetime.now().astimezone()
    if not as_json:
        what = ", ".join(map(str, found)) or "nothing to change"
        return f"{now:%H:%M:%S} {what}: {proposal.reason}"
    return json.dumps(
        {
            "time": now.isoformat(timespec="seconds"),
            "proposals": [
                {"action": c.action, "instance": c.instance, **_type(c.key)} for c in found
            ],
            "desired": [{**_type(k), "instances": n} for k, n in proposal.desired.items()],
            "rate_per_s": proposal.rate_per_s,
            "held_per_s": proposal.held_per_s,
            "short": proposal.short,
            "reason": proposal.reason,
        }
    )


def _type(key: Key) -> dict[str, Any]:
    return {"accelerator": key[0], "tensor_parallel": int(key[1])}


class LoadWatch:
    """The state kept between looks.

    Args:
        ask: returns what the gateway has seen now, and the file.
        sleeps: whether the engine of an instance, by id, can be put to sleep.
    """

    def __init__(self, ask: Callable[[], Replan], sleeps: Callable[[str], bool]) -> None:
        self._ask = ask
        self._sleeps = functools.cache(sleeps)
        self._follower: Follower | None = None
        self._rates: HeldRates | None = None

    def look(self, now_s: float) -> tuple[list[FleetChange], Proposal]:
        """What to change, and the desired numbers.

        Raises:
            HeteroGatewayError: the gateway does not answer, or has too little data.
        """
        again = self._ask()
        seats, ranks = _seats(again, self._sleeps)
        types = _types(again, seats, ranks)
        if self._follower is None or self._follower.types != types:
            follower = Follower(types)
            if self._follower is not None:
                follower.go_on_from(self._follower)
            self._follower = follower
        requests = [(row.input_tokens, row.output_tokens) for row in again.seen.rows[-_LENGTHS:]]
        if not requests:
            raise HeteroGatewayError(
                "the gateway has seen no requests yet, so there is nothing to propose"
            )
        q = again.request.question
        counts = Counter(seat.key for seat in seats if seat.standing == "ready")
        question = RateQuestion(
            {t.key: q.types[t.key].profile for t in types},
            requests,
            q.goals,
            counts,
            again.seen.policy,
            q.engines,
            q.seed,
            ranks,
        )
        if self._rates is None or not self._rates.answers(question):
            self._rates = find_held_rates(question)
        proposal = self._follower.follow(_sample(again, counts, now_s), self._rates)
        return changes(proposal.desired, seats), proposal


def _seats(again: Replan, sleeps: Callable[[str], bool]) -> tuple[list[Seat], dict[Key, int]]:
    """Instances, awake or asleep, on accelerators of the file; and by type the ranks of one, each
    of which is a place: they start, sleep and stop together.
    """
    keys = {placed.instance.id: placed.key for placed in again.present.placed}
    models = {m for placed in again.present.placed for m in placed.instance.models}
    accelerators = {machine.accelerator for machine in again.request.question.machines}
    standings: tuple[Standing, ...] = ("ready", "asleep", "draining")
    places = Counter(instance.server for instance in again.seen.running)
    seats: dict[str, Seat] = {}
    ranks: dict[Key, int] = {}
    for instance in again.seen.running:
        key = keys.get(instance.id)
        profile = instance.profile
        if (
            key is None
            and instance.draining
            and profile is not None
            and models & set(instance.models)
        ):
            own = key_of(profile)
            key = own if own[0] in accelerators and own in again.request.question.types else None
        if key is None:
            continue
        name, in_flight = instance.server or instance.id, instance.in_flight
        at = 1 if instance.asleep else 2 if instance.draining else 0
        if (seat := seats.get(name)) is not None:
            at, in_flight = min(at, standings.index(seat.standing)), in_flight + seat.in_flight
        seats[name] = Seat(name, key, standings[at], in_flight, sleeps(name))
        if instance.server:
            ranks[key] = max(ranks.get(key, 1), places[instance.server])
    return list(seats.values()), ranks


def _types(again: Replan, seats: list[Seat], ranks: Mapping[Key, int]) -> tuple[ScaledType, ...]:
    """The running types, and for each idle accelerator the smallest type that fits.

    Free capacity of an accelerator may become instances of its smallest type.
    """
    question = again.request.question
    there = Counter(seat.key for seat in seats)
    room = Counter[str]()
    price: dict[str, float | None] = {}
    for machine in question.machines:
        room[machine.accelerator] += machine.count
        price[machine.accelerator] = machine.price_per_hour_usd
    size = {key: key[1] * ranks.get(key, 1) for key in (*there, *question.types)}
    for key, number in there.items():
        room[key[0]] -= size[key] * number
    priced = all(each is not None for each in price.values())
    found = []
    for name in price:
        own = sorted(key for key in there if key[0] == name)
        own = own or sorted(key for key in question.types if key[0] == name)[:1]
        for i, key in enumerate(own):
            most = there[key] + (max(0, room[name]) // size[key] if not i else 0)
            cost = size[key] * ((price[name] or 0.0) if priced else 1.0)
            if most:
                found.append(ScaledType(key, 0, most, cost))
    cheapest = min(found, key=lambda t: t.cost)
    return tuple(dataclasses.replace(t, least=1) if t is cheapest else t for t in found)


def _sample(again: Replan, ready: Mapping[Key, int], now_s: float) -> LoadSample:
    """What arrived, by requests that ended and those in progress, which arrived last."""
    seen = again.seen
    came = sorted(min(at_s, now_s) for at_s in seen.arrived_unix_s)
    models = {m for placed in again.present.placed for m in placed.instance.models}
    own = [instance for instance in seen.running if models & set(instance.models)]
    under_way = seen.queued + sum(instance.in_flight for instance in own)
    points: list[tuple[float, float]] = []
    if came:
        step_s = max(came[0], now_s - _LOOKS_BACK_S)
        number = 0
        while step_s < now_s:
            while number < len(came) and came[number] <= step_s:
                number += 1
            points.append((step_s, float(number)))
            step_s += _STEP_S
    points.append((now_s, float(len(came) + under_way)))
    return LoadSample(now_s, points, seen.queued, ready)
