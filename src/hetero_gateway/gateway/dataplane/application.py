"""The hot path: opens every request on an engine path, and closes all of them at the end.

There are two ways in. The server's own protocol (``http.protocol``) calls ``open``, and what that
returns, from its callbacks; any other ASGI server runs ``serve``. From there on there is one way
(``attempts``). Per request there is one pass through the policy, the ledger and the metrics; per
chunk there is none.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from hetero_gateway.core.lengths.predictors import BytesPerToken, OutputLengthPredictor
from hetero_gateway.core.scheduling.decision_log import DecisionLog
from hetero_gateway.engines.vllm import Work
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.log_config import LogConfig
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.admission.limits import Limiter
from hetero_gateway.gateway.dataplane.access_log import AccessLog
from hetero_gateway.gateway.dataplane.attempts import Attempts
from hetero_gateway.gateway.dataplane.continuing import continuations_of
from hetero_gateway.gateway.dataplane.ended import EndedRequests, Take, Tracing
from hetero_gateway.gateway.dataplane.handover import Handovers
from hetero_gateway.gateway.dataplane.intake import Intake
from hetero_gateway.gateway.dataplane.placement import LocalDispatcher, Placement
from hetero_gateway.gateway.dataplane.predictor import make_predictor, predictor_settings
from hetero_gateway.gateway.dataplane.priorities import priorities_of
from hetero_gateway.gateway.dataplane.reading import LongBodies
from hetero_gateway.gateway.dataplane.recording import (
    RecordingDispatcher,
    RecordingRecorder,
    RunFile,
)
from hetero_gateway.gateway.dataplane.records import Recorder
from hetero_gateway.gateway.dataplane.relay import Deadlines
from hetero_gateway.gateway.dataplane.retry_budget import RetryBudget
from hetero_gateway.gateway.dataplane.rooms import AnsweredRequests, Rooms
from hetero_gateway.gateway.dataplane.routes import ModelRoutes
from hetero_gateway.gateway.fleet.ejection import OutcomeWatch
from hetero_gateway.gateway.fleet.engine_calls import EngineCalls
from hetero_gateway.gateway.fleet.health import HealthMonitor
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.fleet.pairing import Pairing
from hetero_gateway.gateway.records.history import RequestHistory
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.records.request_log import RequestLog
from hetero_gateway.gateway.request.body_fields import BodyReaders
from hetero_gateway.gateway.request.tokenizer import Tokenizer, tokenizer_of
from hetero_gateway.gateway.settings import Prepared, Settings
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.http.cors import cors_of
from hetero_gateway.http.downstream import (
    AsgiDownstream,
    Receive,
    Scope,
    Send,
)
from hetero_gateway.http.headers import RequestFields, named_by_connection
from hetero_gateway.http.heads import Inbound


class DataPlaneParts(Protocol):
    """The parts of a gateway's data plane.

    ``prefix_secret``: the start of prompt keys; None: a random one.
    """

    fleet: Fleet
    outcomes: OutcomeWatch
    metrics: Metrics
    admission: Admission
    predictor: OutputLengthPredictor
    bytes_per_token: BytesPerToken
    tokenizer: Tokenizer | None
    deadlines: Deadlines
    placement: Placement
    prefix_secret: bytes | None

    @property
    def config(self) -> GatewayConfig: ...


class DataPlane:
    """Serves the engine's POST paths.

    Args:
        run: records a line for each request; None: not recorded.
    """

    def __init__(self, of: DataPlaneParts, health: HealthMonitor, run: RunFile | None) -> None:
        config, fleet, outcomes, metrics = of.config, of.fleet, of.outcomes, of.metrics
        placement, usage = of.placement, of.admission.usage
        server, self._contexts = config.server, fleet.contexts
        self.body_limits = BodyLimits(server.max_body_bytes, server.max_buffered_bytes)
        self.open_exchanges = of.deadlines
        history = self._history = RequestHistory()
        # Each entry holds arrays of one entry per instance: about 8, or 30 with an outlook.
        entries = 25_000 if placement.queues else 100_000
        size = max(16, min(1024, entries // max(1, len(config.instances))))
        self.decisions = DecisionLog(size)
        self.intake = Intake(
            config,
            self.body_limits,
            fleet,
            of.predictor,
            of.bytes_per_token,
            of.tokenizer,
            of.prefix_secret or os.urandom(32),
        )
        learn = (fleet, health, outcomes, metrics, of.predictor, of.bytes_per_token, history, usage)
        self.recorder = Recorder(*learn) if run is None else RecordingRecorder(run, *learn)
        drive = (
            *(self.intake, placement, self.recorder, outcomes, metrics, self.decisions),
            Limiter(usage, self.recorder.catch_up),
        )
        self.dispatcher = (
            LocalDispatcher(*drive) if run is None else RecordingDispatcher(run, *drive)
        )
        self.rooms = Rooms(
            hops=fleet.hops,
            admission=of.admission,
            intake=self.intake,
            dispatcher=self.dispatcher,
            deadlines=of.deadlines,
            metrics=metrics,
            budget=RetryBudget(config.retry),
            total_timeout_s=config.timeouts.total_s,
            connect_timeout_s=config.timeouts.connect_s,
            open=set(),
            reading=LongBodies(),
            answered=AnsweredRequests(),
        )
        self.rooms.cors = cors_of(server.cors)
        self.rooms.fields = RequestFields(server.allow_engine_headers)
        self.rooms.priorities = priorities_of(config.scheduler.engine_priorities)
        self._set_continuations(config)
        # Take a request whose head is here; it may be answered at once.
        self.open = partial(Attempts.open, self.rooms)

    def settings(self, settings: Settings, base_dir: Path, failures: Counter[str]) -> None:
        """Register the settings of this part that can change.

        Args:
            base_dir: what the files of a trained predictor and a tokenizer are relative to.
            failures: counts those of an installed predictor.
        """

        def prepare_predictor(fresh: GatewayConfig) -> Prepared | None:
            if predictor_settings(fresh) == predictor_settings(settings.config):
                return None  # its learnt state would be lost
            predictor = make_predictor(fresh, base_dir, failures)

            def apply() -> None:
                self.intake.predictor = self.recorder.predictor = predictor

            return Prepared(apply)

        def prepare_intake(fresh: GatewayConfig) -> Prepared:
            tokenizer = tokenizer_of(fresh.scheduler.tokens, base_dir)
            return Prepared(lambda: self.intake.set(fresh.scheduler, tokenizer))

        settings.add(("scheduler.predictor", "scheduler.policy"), prepare_predictor)
        settings.add(
            ("scheduler.policy", "scheduler.tokens.image_tokens",
             "scheduler.tokens.speech_tokens_per_s", "scheduler.tokens.tokenizer_file",
             "scheduler.tokens.thread_above_bytes"),
            prepare_intake,
        )  # fmt: skip
        settings.add(
            ("retry", "timeouts.first_byte_s", "timeouts.idle_s", "timeouts.total_s",
             "server.max_body_bytes", "server.max_buffered_bytes"),
            self._prepare,
        )  # fmt: skip
        settings.add(("server.cors",), self._prepare_cors)
        settings.add(
            ("server.allow_engine_fields", "server.allow_engine_headers",
             "scheduler.engine_priorities"),
            self._prepare_engine_fields,
        )  # fmt: skip
        settings.add(("models",), self._prepare_routes)
        settings.add(
            ("scheduler.continue_streams", "server.max_kept_bytes"),
            lambda fresh: Prepared(partial(self._set_continuations, fresh)),
        )

    def _set_continuations(self, config: GatewayConfig) -> None:
        rooms = self.rooms
        rooms.continuations = continuations_of(
            config, rooms.budget, rooms.open, rooms.metrics.streams_continued
        )

    def _prepare_cors(self, fresh: GatewayConfig) -> Prepared:
        def apply() -> None:
            self.rooms.cors = cors_of(fresh.server.cors)

        return Prepared(apply)

    def _prepare_engine_fields(self, fresh: GatewayConfig) -> Prepared:
        fields = RequestFields(fresh.server.allow_engine_headers)
        priorities = priorities_of(fresh.scheduler.engine_priorities)

        def apply() -> None:
            self.intake.readers = BodyReaders(fresh.server.allow_engine_fields)
            self.rooms.fields, self.rooms.priorities = fields, priorities

        return Prepared(apply)

    def _prepare_routes(self, fresh: GatewayConfig) -> Prepared:
        routes = ModelRoutes(fresh, self._contexts)

        def apply() -> None:
            self.intake.routes.close()
            self.intake.routes = routes

        return Prepared(apply)

    def wakes_by(self, calls: EngineCalls, settings: Settings) -> None:
        """Wake sleeping engines on demand, if configured."""

        def prepare(fresh: GatewayConfig) -> Prepared:
            wakes = fresh.scheduler.wake_on_demand

            def apply() -> None:
                self.dispatcher.engine_calls = calls if wakes else None

            return Prepared(apply)

        prepare(settings.config).apply()
        settings.add(("scheduler.wake_on_demand",), prepare)

    def splits_by(self, pairing: Pairing, settings: Settings) -> None:
        """Split requests among two instances, if configured."""

        def prepare(fresh: GatewayConfig) -> Prepared:
            pairs, rooms = pairing.prepare(fresh), self.rooms

            def apply() -> None:
                pairs.apply()
                rooms.handovers = None
                if pairing.splits:
                    rooms.handovers = Handovers(
                        fresh.timeouts.first_byte_s,
                        rooms.metrics.handovers,
                        self.dispatcher.placement.legs,
                        self.recorder,
                    )

            return Prepared(apply, pairs.changed)

        prepare(settings.config).apply()
        settings.add(
            ("scheduler.split_requests", "scheduler.pairs_file", "timeouts.first_byte_s"),
            prepare,
            always=True,
        )
        settings.files.append(
            lambda new: [file] if (file := new.scheduler.pairs_file) is not None else []
        )

    def _prepare(self, fresh: GatewayConfig) -> Prepared:
        def apply() -> None:
            self.rooms.budget.config = fresh.retry
            self.rooms.total_timeout_s = fresh.timeouts.total_s
            self.rooms.connect_timeout_s = fresh.timeouts.connect_s
            self.open_exchanges.set_config(fresh.timeouts)
            self.body_limits.set(fresh.server.max_body_bytes, fresh.server.max_buffered_bytes)

        return Prepared(apply)

    def write_about(
        self,
        log: LogConfig,
        access: Callable[[list[bytes]], None] | None,
        tracing: Tracing | None = None,
    ) -> None:
        """Report each request that has ended.

        Args:
            access: takes the access log's lines; None: no access log.
            tracing: makes spans of requests; closed with this.
        """
        takers: list[Take] = []
        if access is not None and log.access:
            knows = self.dispatcher.placement.knows
            takers.append(AccessLog(access, as_json=log.format == "json", knows=knows))
        self.rooms.tracing = tracing
        if tracing is not None:
            takers.append(tracing)
        if takers:
            self.rooms.ended = EndedRequests(takers)

    def __len__(self) -> int:
        """The number of open requests."""
        return len(self.rooms.open)

    @property
    def history(self) -> RequestHistory:
        """The last finished requests."""
        self.recorder.catch_up()
        return self._history

    @property
    def request_log(self) -> RequestLog:
        """The outcomes of the last requests."""
        self.recorder.catch_up()
        return self.recorder.log

    async def serve(self, scope: Scope, receive: Receive, send: Send, work: Work) -> None:
        """Serve one request of an ASGI server."""
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        downstream = AsgiDownstream(receive, send)
        headers, method = scope["headers"], scope["method"].encode()
        if method == b"HEAD":
            method = b"GET"  # the server leaves the body out
        inbound = Inbound(scope["path"], target, work, headers, method=method)
        inbound.dropped = named_by_connection(headers)
        attempts = self.open(inbound, downstream)
        try:
            await downstream.read_body(attempts, inbound, self.body_limits)
            await downstream.relay(attempts)
        except asyncio.CancelledError:
            # The server is shutting down, and this request did not finish in the time allowed.
            attempts.shut_down()
            await downstream.flush()
            raise
        finally:
            downstream.gone = True
            attempts.client_gone()
            if inbound.buffer is not None:
                inbound.buffer.release()

    def close(self) -> None:
        """Answer unfinished requests: the gateway is shutting down."""
        for attempts in list(self.rooms.open):
            attempts.shut_down()
        if self.rooms.ended is not None:
            self.rooms.ended.pass_on()
        self.intake.routes.close()
        if self.rooms.tracing is not None:
            self.rooms.tracing.close()
        self.recorder.close()
