"""The running gateway: every part, wired together. Built by ``app.create_app``, one per app."""

import asyncio
import hmac
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_gateway.core.lengths.predictors import (
    BytesPerToken,
    LengthFeatures,
    capped_output_tokens,
)
from hetero_gateway.core.scheduling.disciplines import Clients
from hetero_gateway.files.admin_key import made_admin_key
from hetero_gateway.files.client_keys import changes, read_clients
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.secrets import secret
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.dataplane.application import DataPlane
from hetero_gateway.gateway.dataplane.ended import Tracing
from hetero_gateway.gateway.dataplane.models import InstanceListing
from hetero_gateway.gateway.dataplane.placement import Placement
from hetero_gateway.gateway.dataplane.predictor import make_predictor
from hetero_gateway.gateway.dataplane.recording import RunFile
from hetero_gateway.gateway.dataplane.relay import Deadlines
from hetero_gateway.gateway.fleet import kv_events
from hetero_gateway.gateway.fleet.ejection import OutcomeWatch
from hetero_gateway.gateway.fleet.engine_calls import EngineCalls
from hetero_gateway.gateway.fleet.health import HealthMonitor
from hetero_gateway.gateway.fleet.instances import DISCIPLINE_FIELDS, Fleet, Instance
from hetero_gateway.gateway.fleet.liveness import LivenessWatch
from hetero_gateway.gateway.fleet.pairing import Pairing
from hetero_gateway.gateway.fleet.roster import Roster
from hetero_gateway.gateway.fleet.setup import SetupWatch
from hetero_gateway.gateway.fleet.sources.discovery import Discovery
from hetero_gateway.gateway.records.client_metrics import client_families
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.request.tokenizer import tokenizer_of
from hetero_gateway.gateway.settings import Prepared, Settings, SettingsChange
from hetero_gateway.http.hops import Hops
from hetero_gateway.http.tls import server_tls
from hetero_gateway.scaleout.workers import SECRET_ENV
from hetero_gateway.serve.dashboard.board import Board
from hetero_gateway.serve.wiring.reload import Reloader

if TYPE_CHECKING:
    from hetero_gateway.scaleout.sharing.peers import Sharing
    from hetero_gateway.scaleout.workers.hub import Hub
    from hetero_gateway.serve.autoscaling.following import Following
    from hetero_gateway.serve.autoscaling.roles import RoleSearch
    from hetero_gateway.serve.batches.service import Batches
    from hetero_gateway.serve.handover.handover import Handover
    from hetero_gateway.serve.usage.keeper import UsageKeeper


def _key_names(config: GatewayConfig) -> set[str | None]:
    """The variables with instances' keys that the file names; None: an instance without one."""
    names = [instance.api_key_env for instance in config.instances]
    names += [source.api_key_env for source in config.discovery]
    return {None, *names}


def _tls_files(config: GatewayConfig) -> set[Path | None]:
    """The files for instances' TLS that the file names; None: an instance without one."""
    files = [(i.ca_file, i.certificate_file, i.key_file) for i in config.instances]
    files += [(s.ca_file, s.certificate_file, s.key_file) for s in config.discovery]
    return {None, *itertools.chain.from_iterable(files)}


class Parts:
    """The parts of a single-process gateway, and of each of several workers.

    Args:
        config: of this process.
        config_path: the file that it came from; names in it are relative to that.
    """

    has_admin = False  # in this process

    def __init__(self, config: GatewayConfig, config_path: Path | None) -> None:
        self.settings = Settings(config)
        self.draining = False
        # Takes the lines of the access log; None: there is none.
        self.access: Callable[[list[bytes]], None] | None = None
        base_dir = self._base_dir = config_path.parent if config_path else Path()
        # A further listener for clients besides their address; None: there is none.
        socket_path = config.server.client_socket
        self.client_socket = None if socket_path is None else base_dir / socket_path
        clients = config.clients
        self.admission = Admission(
            secret(config.server.api_key_env, "server.api_key_env"),
            read_clients(clients, base_dir) if clients.wanted else None,
            secret(clients.hash_key_env, "clients.hash_key_env"),
        )
        self.tls = server_tls(config.server, base_dir, section="server", protocol="http/1.1")
        # Shared by all workers; the keys of prompts begin with it, or with the operator's own.
        shared = os.environ.get(SECRET_ENV)
        named = secret(config.scheduler.prefix_key_env, "scheduler.prefix_key_env")
        self._named_prefix_secret = named.encode() if named else None
        self.prefix_secret = (named or shared or "").encode() or None
        self.fleet = Fleet(config, base_dir, Hops(shared))
        scheduler = self.fleet.scheduler
        self.metrics = Metrics(config.scheduler.policy, self.fleet.gauges, lambda: scheduler.queued)
        self.predictor = make_predictor(config, base_dir, self.metrics.predictor_failures)
        tokens = config.scheduler.tokens
        self.bytes_per_token = BytesPerToken(tokens.bytes_per_token)
        self.tokenizer = tokenizer_of(tokens, base_dir)
        self._stack = AsyncExitStack()
        self.deadlines: Deadlines
        self.outcomes: OutcomeWatch
        self.placement: Placement
        self.dataplane: DataPlane

    @property
    def config(self) -> GatewayConfig:
        """The configuration in effect in this process."""
        return self.settings.config

    @property
    def listing(self) -> InstanceListing:
        """The data for /readyz and /v1/models."""
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        self.draining = True
        await self._stack.aclose()

    def drain(self) -> None:
        """It was asked to stop, and will end soon: no longer ready."""
        self.draining = True

    def serves(self, clients: Sequence[socket.socket], admin: Sequence[socket.socket]) -> None:
        """It listens on these from now on."""

    def reload_soon(self, cause: str) -> None:
        """It was asked to read its configuration again."""

    def _begin_placing(self, ask: Callable[[Instance], None], *, recalibrate: bool) -> None:
        """``ask``: checks an instance's /health now."""
        self.outcomes = OutcomeWatch(self.fleet, self.metrics)
        self._stack.callback(self.outcomes.close)
        self.deadlines = Deadlines(self.config.timeouts)
        self._stack.callback(self.deadlines.close)
        self._stack.callback(self.fleet.close)
        queue = self.config.scheduler.queue
        self.placement = Placement(self.fleet, self.metrics, queue, recalibrate=recalibrate)
        self._stack.callback(self.placement.close)
        watch = self.placement.liveness = LivenessWatch(
            self.fleet, self.outcomes, self.placement.steps, ask, self.deadlines.leave_silent
        )
        self._stack.callback(watch.close)

    def _write_about_requests(self) -> None:
        traces: Tracing | None = None  # off, and not imported
        if self.config.traces.endpoint is not None:
            from hetero_gateway.gateway.dataplane.tracing import Tracer

            traces = Tracer(self.config.traces)
        self.dataplane.write_about(self.config.log, self.access, traces)
        self._stack.callback(self.dataplane.close)


class Gateway(Parts):
    """The parts shared by control paths and data plane. ``start`` needs a running event loop.

    Args:
        config: the whole configuration.
        config_path: the file it came from, for reloading; profile files are relative to it.
        hub_listener: where workers connect, if it decides for them.
        record: the file that keeps a line for each request; None: there is none.
        flags: dotted names of fields that the command line has set, and their values.
    """

    has_admin = True

    def __init__(
        self,
        config: GatewayConfig,
        config_path: Path | None = None,
        hub_listener: socket.socket | None = None,
        record: Path | None = None,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        # Created at this start, if the configuration leaves it to the gateway.
        self.made_admin_key = made_admin_key(config.server, os.environ.get(SECRET_ENV))
        named = secret(config.server.admin_key_env, "server.admin_key_env")
        self.admin_key = named or self.made_admin_key
        super().__init__(config, config_path)
        self._record = record
        self.config_path = config_path
        self._hub_listener = hub_listener
        self.hub: Hub | None = None
        # If there are workers: stores the configuration for processes that start.
        self.keep_config: Callable[[GatewayConfig], None] | None = None
        # None is one of them: an instance without a key.
        self.known_key_names = _key_names(config)
        self.known_tls_files = _tls_files(config)
        self.setup = SetupWatch(self.fleet)
        self._share_out()
        scheduler, base_dir = self.fleet.scheduler, self._base_dir
        self.metrics.clients = lambda: client_families(
            self.admission, self.config.clients.most_labels, self.metrics.models
        )
        self.sharing = self.metrics.sharing = self._make_sharing()
        if (caches := scheduler.caches) is not None:
            index = caches.index
            self.metrics.prefix_index = lambda: (len(index), index.memory_bytes())
        self.roster = Roster(self.fleet, self.metrics.forget)
        self.discovery = Discovery(self.roster, self.settings, base_dir)
        self.reloader = Reloader(
            self.roster, self.settings, self.metrics, self.take_up, config_path, flags or {}
        )
        self.health: HealthMonitor
        self.engine_calls: EngineCalls
        self.kv_events: kv_events.KvEventReaders | None = None  # None: not available
        self.board: Board
        self.following: Following | None = None  # None: it is off
        self.roles: RoleSearch | None = None  # the same
        self.batches: Batches | None = None  # the same
        self.usage_keeper = self._make_usage_keeper()  # None: usage is not kept
        if config.batches.on:
            # SQLite is loaded with it.
            from hetero_gateway.serve.batches import service, stores

            self.batches = service.Batches(self, stores.store_of(config.batches, base_dir))
            self.metrics.batches = self.batches.families
        # Set before it starts; None: it cannot be taken over.
        self.handover: Handover | None = None

    @property
    def listing(self) -> Fleet:
        return self.fleet

    async def start(self) -> None:
        """Probe the instances, and keep doing so in the background until ``stop``."""
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        if self.usage_keeper is not None:
            continues = self.handover is not None and self.handover.predecessor is not None
            self.usage_keeper.start(tasks, continues=continues)
            self._stack.push_async_callback(self._stop_keeping_usage)
        self.health = HealthMonitor(self.fleet, self.config.health, tasks)
        self.roster.health = self.health
        self._stack.callback(self.health.stop)
        wanted = self.config.scheduler.kv_events and self.fleet.scheduler.caches is not None
        if wanted and kv_events.available():
            timeout_s = self.config.health.probe_timeout_s
            self.kv_events = kv_events.KvEventReaders(self.fleet, timeout_s, tasks)
            self.kv_events.start()
            self.metrics.kv_events = self.kv_events.counts
            self._stack.push_async_callback(self.kv_events.stop)
        self.engine_calls = EngineCalls(self.fleet, self.health)
        self._stack.callback(self.engine_calls.close)
        self._begin_placing(self.health.ask, recalibrate=self.config.scheduler.recalibrate)
        if self.sharing is not None:
            self.sharing.on_change = self.placement.pump_soon
            await self.sharing.start(tasks)
            if (placements := self.sharing.placements) is not None:
                self.prefix_secret = placements.secret
                placements.on_secret = self._take_up_prefix_secret
            self._stack.push_async_callback(self.sharing.stop)
        expiry = tasks.create_task(self.fleet.close_idle_connections())
        self._stack.callback(expiry.cancel)
        run = None
        if self._record is not None:
            run = RunFile(self._record, self.config.scheduler.policy)
            self._stack.callback(run.close)
        self.dataplane = DataPlane(self, self.health, run)
        self._write_about_requests()
        self.dataplane.wakes_by(self.engine_calls, self.settings)
        pairing = Pairing(self.fleet, self._base_dir)
        self.dataplane.splits_by(pairing, self.settings)
        self.settings.add(
            ("scheduler.split_requests",), lambda _: Prepared(lambda: self._find_roles(pairing))
        )
        self._find_roles(pairing)
        self._stack.callback(self._stop_finding_roles)
        self.board = Board(self)
        self._stack.callback(self.board.close)
        self.metrics.late_probes = lambda: self.health.late
        self.metrics.sources = lambda: [
            (each.config.name, len(each.named), bool(each.problem))
            for each in self.discovery.followers()
        ]
        self._register_settings()
        self.settings.add(("following",), self._prepare_following)
        self._prepare_following(self.config).apply()
        self._stack.callback(self._stop_following)
        self._stack.callback(self.roster.close)
        if self.batches is not None:
            await self.batches.start(tasks)
            self._stack.push_async_callback(self.batches.stop)
        self.reloader.start(tasks)
        self._stack.callback(self.reloader.stop)
        if self.handover is not None:
            await self.handover.begin(self)
            self._stack.push_async_callback(self.handover.close)
        await self.health.start()
        if self.fleet.instances or not self.config.discovery:  # which starts later
            self.setup.look()
        self._stack.callback(tasks.create_task(self.setup.run()).cancel)
        self.discovery.start(tasks)
        self._stack.callback(self.discovery.stop)
        if self._hub_listener is not None:
            from hetero_gateway.scaleout.workers.hub import Hub

            self.hub = Hub(
                self.fleet,
                self.dataplane.dispatcher,
                self.metrics,
                self.admission,
                self._hub_listener,
                self.drain,
            )
            if self.prefix_secret is not None and self.sharing is not None:
                self.hub.tell_prefix_secret(self.prefix_secret)
            await self.hub.start()
            self._stack.push_async_callback(self.hub.stop)

    def _show(self, config: GatewayConfig) -> None:
        self.metrics.per_backend = config.metrics.per_backend

    def _make_sharing(self) -> "Sharing | None":
        """For ``scheduler.shared``; None: this gateway is alone. Raises ConfigError."""
        config = self.config.scheduler
        if config.shared is None:
            return None
        # Its data is in arrays: numpy is loaded with it, 13 MB.
        from hetero_gateway.scaleout.sharing.peers import make_sharing

        return make_sharing(
            config,
            self.fleet,
            self._base_dir,
            self.admission.accounts,
            self._named_prefix_secret,
        )

    def _make_usage_keeper(self) -> "UsageKeeper | None":
        """Raises ConfigError."""
        clients = self.config.clients
        if (place := clients.usage_place(self.config.scheduler.shared is not None)) is None:
            return None
        # SQLite is loaded with one, and Redis with the other.
        from hetero_gateway.serve.usage.keeper import UsageKeeper, UsageStore

        # A gateway that takes over has the same secret, and all that this one has counted.
        shared = os.environ.get(SECRET_ENV) or secrets.token_hex(32)
        run = hmac.digest(shared.encode(), b"what clients use", "sha256").hex()
        store: UsageStore
        if place == "redis":
            from hetero_gateway.scaleout.sharing.usage import SharedUsage

            store = SharedUsage(self.config.scheduler, self._base_dir, run)
        else:
            from hetero_gateway.serve.usage.file import UsageFile

            store = UsageFile(self._base_dir / place, run)
        return UsageKeeper(self.admission.usage, store, lambda: self.metrics.catch_up())

    async def _stop_keeping_usage(self) -> None:
        assert self.usage_keeper is not None
        await self.usage_keeper.stop(taken=self.handover is not None and self.handover.taken)

    def _take_up_prefix_secret(self, secret: bytes) -> None:
        """Begin keys of prompts with this from now on, as other gateways do."""
        self.prefix_secret = secret
        self.dataplane.intake.begin_keys_with(secret)
        if self.hub is not None:
            self.hub.tell_prefix_secret(secret)

    def _register_settings(self) -> None:
        """Register the settings that can change while serving, and the parts that apply them."""
        for part in (self.fleet, self.placement, self.health):
            part.settings(self.settings)
        self.dataplane.settings(self.settings, self._base_dir, self.metrics.predictor_failures)
        set_policy = self.metrics.set_policy
        self.settings.add(
            ("scheduler.policy",), lambda new: Prepared(lambda: set_policy(new.scheduler.policy))
        )
        self.settings.add(("metrics",), lambda new: Prepared(lambda: self._show(new)))
        self._show(self.config)
        # After the fleet, which has the discipline.
        self.settings.add(DISCIPLINE_FIELDS, lambda _: Prepared(self._share_out))
        if self.config.clients.wanted:
            self.settings.add(
                ("clients.groups", "clients.most_labels"), self._prepare_keys, always=True
            )
            self.settings.files.append(
                lambda new: [self._base_dir / file] if (file := new.clients.keys_file) else []
            )

    def connections_to(self, instance: Instance) -> int:
        """Open connections to an instance, including those of workers."""
        workers = 0 if self.hub is None else self.hub.connections_to(instance.id)
        return instance.pool.open_connections + workers

    def reload_soon(self, cause: str) -> None:
        self.reloader.soon(cause)

    def _prepare_keys(self, fresh: GatewayConfig) -> Prepared | None:
        """Prepare other clients' keys, for all processes."""
        keys, before = read_clients(fresh.clients, self._base_dir), self.admission.keys
        assert before is not None
        names = changes(before, keys)
        take_up = self.admission.prepare_keys(keys)

        def apply() -> None:
            take_up()
            self._share_out()
            if self.hub is not None:
                self.hub.tell_keys()

        return Prepared(apply, names) if names else None

    def _prepare_following(self, fresh: GatewayConfig) -> Prepared:
        """Prepare to follow the load by other settings, or no longer."""
        if not fresh.following.types:
            return Prepared(self._stop_following)
        # Imported here: the simulator is loaded with it, and few use it.
        from hetero_gateway.serve.autoscaling.following import Following, followed

        models = followed(fresh, self._base_dir)

        def apply() -> None:
            if self.following is None:
                self.following = Following(
                    self.settings,
                    self.fleet,
                    self.metrics,
                    self.board.trend,
                    self.dataplane.history,
                )
                self.metrics.following = self.following.families
            self.following.take_up(models)

        return Prepared(apply)

    def _find_roles(self, pairing: Pairing) -> None:
        self._stop_finding_roles()
        if pairing.by_roles:
            # It simulates, in a process of its own: its modules are loaded only if needed.
            from hetero_gateway.serve.autoscaling.roles import RoleSearch

            self.roles = RoleSearch(
                self.settings, self.fleet, self.dataplane.history, self.placement.pump_soon
            )

    def _stop_finding_roles(self) -> None:
        if self.roles is not None:
            self.roles.close()
            self.roles = None

    def _stop_following(self) -> None:
        if self.following is not None:
            self.following.close()
            self.following = None
            self.metrics.following = lambda: ()

    def _share_out(self) -> None:
        if isinstance(self.fleet.discipline, Clients):
            self.fleet.discipline.shares = {c.party: c.share for c in self.admission}

    def drain(self) -> None:
        if self.handover is None or not self.handover.taken:
            super().drain()  # else the gateway is still ready, in another process
        if self.batches is not None:
            self.batches.drain()
        self.board.let_go()

    def serves(self, clients: Sequence[socket.socket], admin: Sequence[socket.socket]) -> None:
        if self.handover is not None:
            # Workers' sockets, or its own.
            self.handover.serves(self.handover.clients or clients, admin)

    def predict_output_tokens(
        self, model: str, prompt_tokens: int, max_tokens: int | None
    ) -> float:
        """The predicted output length of a request, as the data plane would predict it."""
        self.dataplane.recorder.catch_up()
        return capped_output_tokens(
            self.dataplane.intake.predictor.predict(
                LengthFeatures(model, prompt_tokens, max_tokens)
            ),
            max_tokens,
            self.fleet.scheduler.members.pool(model).context_tokens,
            prompt_tokens,
        )

    def take_up(self, change: SettingsChange) -> None:
        """Apply another configuration, except its instances."""
        self.settings.apply(change)
        if self.hub is not None:
            self.hub.tell_settings(self.config)
        if self.keep_config is not None:
            self.keep_config(self.config)
        self.known_key_names = _key_names(change.config)
        self.known_tls_files = _tls_files(change.config)
