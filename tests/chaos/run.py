"""A run: instances, a gateway and its successor, clients, disturbances; then what must be true.

The time of a run is ``asyncio``'s own, from the first client on. Nothing here knows how the gateway
works: all is seen from the clients' side, /admin, /metrics, /proc and the log.
"""

import asyncio
import random
import traceback
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.chaos.clients import PATIENCE_S, Connection, Outcome, Request, draw_request, judge
from tests.chaos.disturbances import CALM_S, Disturbance, draw_disturbances
from tests.chaos.gateway import GatewayProcess
from tests.chaos.instances import Instance, make_instances, write_profiles
from tests.chaos.workers import kill, kill_worker
from tests.fakes.processes import children_of

# How long loads, connections and tasks may take to go back to where they were.
SETTLED_WITHIN_S = 30.0
# The gateway's memory at the end over that after warm-up: what caches and pools may still grow by.
RSS_GROWTH_BYTES = 24 * 2**20
# Every request leaves a trace of at most this much in the log, on average.
LOG_BYTES_PER_REQUEST = 300
SHUTDOWN_TIMEOUT_S = 30
# What is sent so shortly ahead of a gateway's end, or later, may meet a connection that it closes.
CROSSING_S = 0.5
# The processes of a gateway of several.
KILLED_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Options:
    seed: int = 0
    seconds: float = 60.0
    clients: int = 200
    instances: int = 8
    directory: Path = Path()
    workers: int = 1


@dataclass
class Result:
    """Figures by name, and what was wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    disturbances: Counter[str] = field(default_factory=Counter)
    figures: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


class Run:
    """``await Run(options).run()``."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.result = Result()
        self.instances: list[Instance] = []
        self._gateway: GatewayProcess | None = None
        self._over = False
        self._sent: Counter[int] = Counter()  # by the gateway's port
        self._left: Counter[int] = Counter()
        self._latencies_s: list[float] = []
        self._changes = 0
        self._changing = asyncio.Lock()  # there is one file
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._killing = asyncio.Lock()
        # (gateway's port, client's) of what the worker killed last had accepted: a connection that
        # its client has yet to hear of is among them.
        self._killed: set[tuple[int, int]] = set()
        self._removed = False  # the counts of an instance, or of all, go with it
        self._baseline: dict[str, float] = {}
        self._ended_s: dict[int, float] = {}  # when a gateway was told to end, by its port
        self._warm_rss_bytes = 0
        self._peak_rss_bytes = 0

    @property
    def gateway(self) -> GatewayProcess:
        assert self._gateway is not None
        return self._gateway

    def violation(self, text: str) -> None:
        self.result.violations.append(text)

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self) -> Result:
        """A run that breaks off shows what it had found, and why it broke off."""
        try:
            await self._run()
        except Exception:
            self.violation(f"the run broke off: {traceback.format_exc()}")
        return self.result

    async def _run(self) -> None:
        options = self.options
        async with AsyncExitStack() as stack:
            self.instances = make_instances(options.instances, options.seed)
            for instance in self.instances:
                stack.callback(instance.close)
            for instance in self.instances:
                await instance.start()
            self._profiles = write_profiles(self.instances, options.directory)
            self._write_config()
            await self._take_over(stack, "first")
            async with asyncio.TaskGroup() as tasks:
                for number in range(options.clients):
                    tasks.create_task(self._client(number))
                tasks.create_task(self._disturb())
                tasks.create_task(self._watch())
                if options.workers > 1:
                    tasks.create_task(self._kill_processes())
                await asyncio.sleep(options.seconds / 2)
                first = self.gateway
                async with self._killing:
                    await self._take_over(stack, "second")
                    await self._drained(first)
                await asyncio.sleep(max(0.0, self._end_s - self.now_s()))
                self._over = True
            await self._check_end()

    # The gateway

    def _write_config(
        self, without: int | None = None, *, reweighted: int | None = None, broken: bool = False
    ) -> None:
        instances: list[dict[str, Any]] = [
            {"id": i.id, "base_url": i.url, "profile": self._profiles[i.id]}
            for number, i in enumerate(self.instances)
            if number != without
        ]
        if len(self.instances) > 2 and without != len(self.instances) - 1:
            del instances[-1]["profile"]  # one is unprofiled
        if reweighted is not None:
            instances[reweighted]["weight"] = 3.0
        document: dict[str, Any] = {
            "server": {"shutdown_timeout_s": SHUTDOWN_TIMEOUT_S},
            "timeouts": {"connect_s": 1, "first_byte_s": 5, "idle_s": 4, "total_s": 30},
            "health": {"probe_interval_s": 0.5, "probe_timeout_s": 1, "scrape_interval_s": 1},
            "pool": {"idle_expiry_s": 2},
            "scheduler": {"queue": {"timeout_s": 20}},
            "instances": instances,
        }
        if broken:
            document["no_such_section"] = {}
        path = self.options.directory / "gateway.yaml"
        part = path.with_suffix(".part")
        part.write_text(yaml.safe_dump(document), "utf-8")
        part.replace(path)

    async def _take_over(self, stack: AsyncExitStack, name: str) -> None:
        """A gateway of its own port gets all requests from now on."""
        directory = self.options.directory
        gateway = await GatewayProcess.start(
            directory / "gateway.yaml", directory / f"{name}.log", self.options.workers
        )
        stack.push_async_callback(gateway.aclose)
        await self._ready(gateway)
        self._baseline = await self._holdings(gateway)
        self._warm_rss_bytes = 0
        self._removed = False
        self._gateway = gateway
        self._began_s = self.now_s()
        if name == "first":
            self._end_s = self._began_s + self.options.seconds

    async def _ready(self, gateway: GatewayProcess) -> None:
        async def all_up() -> str | None:
            rows = (await gateway.get("/admin/instances"))["instances"]
            down = [row["id"] for row in rows if not row["up"]]
            return None if len(down) <= len(rows) / 2 else f"down from the start: {down}"

        await self._eventually(all_up)

    async def _drained(self, gateway: GatewayProcess) -> None:
        """The first one is told to go while requests are under way on it."""
        self._ended_s[gateway.port] = self.now_s()
        gateway.terminate()
        code = await gateway.wait(SHUTDOWN_TIMEOUT_S + 10)
        if code != 0:
            self.violation(f"the first gateway's exit code is {code}")
        self._alarms(gateway)

    async def _holdings(self, gateway: GatewayProcess) -> dict[str, float]:
        metrics = await gateway.metrics()
        held = {"descriptors": gateway.descriptors, "threads": gateway.threads}
        tasks = metrics.get("hetero_gateway_event_loop_tasks")
        return held if tasks is None else held | {"tasks": tasks[()]}

    def _alarms(self, gateway: GatewayProcess) -> None:
        for line in gateway.alarms()[:5]:
            self.violation(f"{gateway.log.name}: {line}")

    # Clients

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self.options.seed}/{number}")
        connection: Connection | None = None
        sequence = 0
        await asyncio.sleep(rng.random())
        while not self._over:
            tag = f"s{self.options.seed}-c{number}-r{sequence}"
            sequence += 1
            request = draw_request(rng, tag)
            while True:
                gateway = self.gateway
                if connection is None or not connection.open or connection.port != gateway.port:
                    if connection is not None and connection.open:
                        connection.leave(reset=False)
                    connection = await self._connect(gateway.port)
                    if connection is None:
                        return
                outcome = await self._exchange(rng, connection, request, gateway.port)
                self.result.outcomes[outcome] += 1
                if outcome is not Outcome.UNSENT:
                    break
                request = draw_request(random.Random(tag), tag)
            await asyncio.sleep(rng.expovariate(1 / 0.2))
        if connection is not None and connection.open:
            connection.leave(reset=rng.random() < 0.5)

    async def _connect(self, port: int) -> Connection | None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        except OSError as error:
            if port == self.gateway.port:
                self.violation(f"no connection to the gateway: {error}")
                return None
            return await self._connect(self.gateway.port)  # it was replaced meanwhile
        connection.port = port
        if (port, connection.local_port) in self._killed:
            connection.killed_s = self.now_s()
        self._connections.add(connection)
        connection.watch(lambda data: self.violation(f"bytes that nobody asked for: {data[:80]!r}"))
        return connection

    async def _exchange(
        self, rng: random.Random, connection: Connection, request: Request, port: int
    ) -> Outcome:
        patience_s = PATIENCE_S
        leaves = rng.random() < 0.1
        if leaves:
            patience_s = rng.choice((0.0, 0.05, 0.3, 1.0))
        request.sent_s = self.now_s()
        self._sent[port] += 1
        done = connection.expect(request)
        await _send(rng, connection, request)
        try:
            async with asyncio.timeout(patience_s):
                await done
        except TimeoutError:
            connection.leave(reset=rng.random() < 0.5)
            if leaves:
                self._left[port] += 1
                return Outcome.LEFT
            self.violation(f"{request.tag}: no outcome within {PATIENCE_S:g} s")
            return Outcome.BROKEN
        request.ended_s = self.now_s()
        if connection.killed_s is not None and not request.whole:
            connection.open = False
            self._sent[port] -= 1
            return Outcome.KILLED
        if not request.whole:
            connection.open = False
        if self._crossed_the_end(request, port):
            self._sent[port] -= 1
            return Outcome.UNSENT
        outcome, violation = judge(request, self._was_empty)
        if violation is not None:
            where = request.headers.get(b"x-hetero-gateway-instance", b"-").decode()
            at_s = request.sent_s - self._began_s
            self.violation(f"{request.tag} ({where}, gateway {port}, {at_s:.1f} s): {violation}")
        if outcome is Outcome.UNSENT:
            self._sent[port] -= 1
        if outcome is Outcome.COMPLETED:
            self._latencies_s.append(request.ended_s - request.sent_s)
        return outcome

    def _crossed_the_end(self, request: Request, port: int) -> bool:
        """It met the close of a connection on which the gateway that ends had no request yet."""
        ended_s = self._ended_s.get(port)
        return (
            ended_s is not None
            and not request.raw_bytes
            and request.failure is None
            and request.sent_s > ended_s - CROSSING_S
        )

    def _was_empty(self, request: Request) -> bool:
        name = request.headers.get(b"x-hetero-gateway-instance", b"").decode()
        return any(
            i.id == name and i.had("empty", request.sent_s, request.ended_s) for i in self.instances
        )

    # Disturbances

    async def _disturb(self) -> None:
        begun_s = self._began_s
        plan = draw_disturbances(self.options.seed, self.options.seconds, self.options.instances)
        async with asyncio.TaskGroup() as tasks:
            for each in plan:
                await asyncio.sleep(max(0.0, begun_s + each.at_s - self.now_s()))
                self.result.disturbances[each.kind] += 1
                tasks.create_task(self._apply(each))
        async with self._changing:
            self._write_config()
            await self._reload(200)

    async def _apply(self, disturbance: Disturbance) -> None:
        kind = disturbance.kind
        if kind == "reload":
            async with self._changing:
                await self._change_config(disturbance)
            return
        instance = self.instances[disturbance.instance]
        async with instance.turn:
            await self._break(instance, disturbance)

    async def _break(self, instance: Instance, disturbance: Disturbance) -> None:
        kind = disturbance.kind
        if kind == "restart":
            instance.kill()
            await asyncio.sleep(disturbance.duration_s)
            await instance.start()
        elif kind == "stop":
            instance.stop()
            await asyncio.sleep(disturbance.duration_s)
            instance.go_on()
        else:
            instance.break_off(kind, disturbance.share, self.now_s())
            await asyncio.sleep(disturbance.duration_s)
            instance.break_off(None, 0.0, self.now_s())

    async def _kill_processes(self) -> None:
        """A worker, the scheduler process, another worker, and so on, by SIGKILL."""
        number = 0
        while self.now_s() < self._end_s - CALM_S - KILLED_EVERY_S:
            await asyncio.sleep(KILLED_EVERY_S)
            # A reload is nobody's while there is no scheduler; and a gateway is to end well.
            async with self._killing, self._changing:
                gateway = self.gateway
                there = children_of(gateway.pid)
                workers = sorted(role for role in there if role != "null")
                number += 1
                if number % 2:
                    role = workers[number // 2 % len(workers)]
                    ports = kill_worker(there[role], gateway.port)
                    self._killed = {(gateway.port, port) for port in ports}
                    for connection in self._connections:
                        if (connection.port, connection.local_port) in self._killed:
                            connection.killed_s = self.now_s()
                    self.result.disturbances["worker killed"] += 1
                else:
                    kill(there["null"])
                    self._removed = True
                    self.result.disturbances["scheduler killed"] += 1

                async def all_there() -> str | None:
                    metrics = await gateway.metrics()  # noqa: B023
                    count = metrics["hetero_gateway_workers"][()]
                    return None if count == self.options.workers else f"{count:g} workers"

                await self._eventually(all_there)

    async def _change_config(self, disturbance: Disturbance) -> None:
        """An instance goes and comes back, one gets a new weight, or a file must be refused."""
        self._changes += 1
        if self._changes % 3 == 0:
            self._write_config(broken=True)
            await self._reload(400)
        elif self._changes % 3 == 1:
            self._write_config(reweighted=disturbance.instance)
            await self._reload(200)
        else:
            self._removed = True
            self._write_config(without=disturbance.instance)
            await self._reload(200)
            await asyncio.sleep(min(1.0, disturbance.duration_s))
        self._write_config()
        await self._reload(200)

    async def _reload(self, expected: int) -> None:
        status, text = await self.gateway.reload()
        if status != expected:
            self.violation(f"/admin/reload answers {status}, not {expected}: {text[:200]}")

    # What must be true

    async def _watch(self) -> None:
        """Memory, all the time; warm is what has run for a quarter of its time."""
        while not self._over:
            gateway, begun_s = self.gateway, self._began_s
            rss_bytes = gateway.rss_bytes
            self._peak_rss_bytes = max(self._peak_rss_bytes, rss_bytes)
            if not self._warm_rss_bytes and self.now_s() > begun_s + self.options.seconds / 8:
                self._warm_rss_bytes = rss_bytes
            await asyncio.sleep(0.25)

    async def _eventually(
        self, problem: Callable[[], Awaitable[str | None]], within_s: float = SETTLED_WITHIN_S
    ) -> None:
        """Wait until there is no problem; one that stays is a violation."""

        async def seen() -> str | None:
            try:
                return await problem()
            except httpx.HTTPError as error:
                return f"no answer from the gateway: {error!r}"

        deadline_s = self.now_s() + within_s
        while (found := await seen()) is not None:
            if self.now_s() > deadline_s:
                self.violation(found)
                return
            await asyncio.sleep(0.2)

    async def _check_end(self) -> None:
        gateway = self.gateway

        async def loads() -> str | None:
            return "; ".join(await gateway.left_over()) or None

        async def connections() -> str | None:
            rows = (await gateway.get("/admin/instances"))["instances"]
            found = [f"{row['id']}: {row['connections']}" for row in rows if row["connections"]]
            return f"connections to instances are left: {', '.join(found)}" if found else None

        async def up() -> str | None:
            rows = (await gateway.get("/admin/instances"))["instances"]
            found = [f"{row['id']} ({row['down_reason']})" for row in rows if not row["up"]]
            return f"still down: {', '.join(found)}" if found else None

        async def holdings() -> str | None:
            held = await self._holdings(gateway)
            # A probe may be under way on each instance.
            slack = len(self.instances) + 2
            found = [
                f"{name}: {held[name]:g}, {self._baseline[name]:g} at first"
                for name in held
                if held[name] > self._baseline[name] + slack
            ]
            return f"leaked: {', '.join(found)}" if found else None

        for problem in (loads, connections, up, holdings):
            await self._eventually(problem)
        rss_bytes = gateway.rss_bytes
        # A machine so slow that a gateway had no time to warm up has no such figure.
        if 0 < self._warm_rss_bytes < rss_bytes - RSS_GROWTH_BYTES:
            self.violation(
                f"memory: {rss_bytes / 1e6:.1f} MB, {self._warm_rss_bytes / 1e6:.1f} after warm-up"
            )
        self._alarms(gateway)
        sent, left = self._sent[gateway.port], self._left[gateway.port]
        counted = (await gateway.metrics()).get("hetero_gateway_requests_total", {})
        total = int(sum(counted.values()))
        # Who leaves before the body is whole is no request yet.
        if not (0 if self._removed else sent - left) <= total <= sent:
            self.violation(
                f"the gateway counts {total} outcomes; clients sent {sent}, and left {left}"
            )
        log_bytes = gateway.log.stat().st_size
        if log_bytes > LOG_BYTES_PER_REQUEST * max(sent, 1000):
            self.violation(f"the log has {log_bytes} bytes for {sent} requests")
        held = await self._holdings(gateway)
        latencies_s = sorted(self._latencies_s) or [0.0]
        self.result.figures = {
            "seed": self.options.seed,
            "seconds": self.options.seconds,
            "clients": self.options.clients,
            "instances": self.options.instances,
            "requests": sum(self._sent.values()),
            "latency_p50_s": round(latencies_s[len(latencies_s) // 2], 3),
            "latency_p99_s": round(latencies_s[int(len(latencies_s) * 0.99)], 3),
            "gateway_cpu_s": gateway.cpu_s,
            "rss_warm_mb": round(self._warm_rss_bytes / 1e6, 1),
            "rss_end_mb": round(rss_bytes / 1e6, 1),
            "rss_peak_mb": round(self._peak_rss_bytes / 1e6, 1),
            "descriptors_first": self._baseline["descriptors"],
            "descriptors_end": held["descriptors"],
            "tasks_first": self._baseline.get("tasks"),
            "tasks_end": held.get("tasks"),
            "log_bytes": log_bytes,
            "load_left": 0 if not await gateway.left_over() else 1,
        }


async def _send(rng: random.Random, connection: Connection, request: Request) -> None:
    """Mostly in one piece."""
    transport = connection.transport
    assert transport is not None
    data = request.head() + request.body
    if rng.random() < 0.05:
        cut = rng.randrange(1, len(data))
        transport.write(data[:cut])
        await asyncio.sleep(rng.choice((0.0, 0.02, 0.2)))
        data = data[cut:]
    if not transport.is_closing():
        transport.write(data)
