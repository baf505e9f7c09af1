"""Turns a request's bytes into what the scheduler needs to know.

Nothing is chosen or sent here. ``read`` looks at the body once; ``describe`` turns its contents
into lengths, exact or estimated. Between the two a tokenizer may count the prompt, if one is
configured: the only step that may take a while, so that its driver can await it (``reading``).
"""

from __future__ import annotations

import os
import sys
import time
from urllib.parse import parse_qs

from mypy_extensions import mypyc_attr

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.lengths.predictors import (
    BytesPerToken,
    LengthFeatures,
    OutputLengthPredictor,
    capped_output_tokens,
)
from hetero_gateway.core.limits.accounts import Charge, LimitStanding
from hetero_gateway.core.policies.base import Decision
from hetero_gateway.core.request import Request, namespace, seed_of
from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import RESPONSES, Work, asked_at, starts_with_a_token
from hetero_gateway.errors import Refusal
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.kv_transfer_config import InstanceTransferConfig
from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.gateway.admission.clients import CLASS_HEADER, Client
from hetero_gateway.gateway.admission.tenants import Tenants
from hetero_gateway.gateway.dataplane.answers import no_previous_response, no_response
from hetero_gateway.gateway.dataplane.responses import Response, Responses
from hetero_gateway.gateway.dataplane.routes import ModelRoutes
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.request.body_fields import LEAST_BYTES, BodyReaders
from hetero_gateway.gateway.request.forms import check_one_type
from hetero_gateway.gateway.request.openai import (
    ParsedRequest,
    parse_body,
    parse_in_steps,
    prompt_field,
    prompt_text,
    with_model,
)
from hetero_gateway.gateway.request.tokenizer import Tokenizer
from hetero_gateway.gateway.turns import Steps
from hetero_gateway.http.bodies import BodyLimits
from hetero_gateway.http.heads import Inbound

_MOST_QUERY_FIELDS = 64
# Kept of each end of a long body, once it is no longer needed.
_LEFT_BYTES = 1024
# Makes a client's request id unique; and the maximum length of one.
_SUFFIX_BYTES = 8
_MOST_REQUEST_ID_BYTES = 128
_SESSION_HEADER = b"x-session-id"
# A member of an enumeration is looked up at each use, which costs as much as a call.
_GENERATE, _LIGHT, _PREFILL = Work.GENERATE, Work.LIGHT, Work.PREFILL
_NO_SESSION = (b"", b"null", b'""')


@mypyc_attr(allow_interpreted_subclasses=True)  # those of workers
class Job:
    """A described request: what is asked, by which client, and its expected length.

    ``features``: inputs of the output's predicted length; None if there is no output.
    ``response``: on /v1/responses, its response, once the id is known.
    ``fell_back``: it is for another model than at first, and has been admitted.
    ``charge``, ``standing``: what its client was charged, and its standing since; None: it has no
    limits, or another process knows. ``waits``: it may have to; work without an engine step never
    does. ``told_tokens``: delivered tokens of its broken answer; the next submission is for the
    rest. None: it did not break.
    """

    __slots__ = (
        "charge",
        "client",
        "features",
        "fell_back",
        "inbound",
        "parsed",
        "request",
        "response",
        "standing",
        "told_tokens",
        "waits",
    )

    def __init__(
        self,
        inbound: Inbound,
        client: Client,
        parsed: ParsedRequest,
        request: Request,
        features: LengthFeatures | None,
        *,
        waits: bool = True,
    ) -> None:
        self.inbound = inbound
        self.client = client
        self.parsed = parsed
        self.request = request
        self.features = features
        self.response: Response | None = None
        self.charge: Charge | None = None
        self.standing: LimitStanding | None = None
        self.fell_back = False
        self.waits = waits
        self.told_tokens: int | None = None

    def estimated_tokens(self) -> int:
        """The tokens of all its prompts and outputs, as its client is charged for them at first."""
        request = self.request
        if self.inbound.work is _LIGHT:
            return 0
        output_tokens = int(request.predicted_output_tokens * request.sequences + 0.5)
        return request.prompt_tokens * self.parsed.prompt_count + output_tokens

    def __repr__(self) -> str:
        return f"<Job {self.inbound!r} {self.request!r}>"


class PrefillLeg:
    """The instance that computes the prompt of a request answered elsewhere.

    ``transfer``: how it hands over; ``sent_s``: when the decode instance was asked, monotonic.
    """

    __slots__ = ("dispatch", "instance", "sent_s", "transfer")

    def __init__(
        self, instance: Instance, dispatch: Dispatch, transfer: InstanceTransferConfig
    ) -> None:
        self.instance = instance
        self.dispatch = dispatch
        self.transfer = transfer
        self.sent_s: float | None = None


class Placed:
    """A request on its instance. ``waited_s``: in the queue; ``placed_s``: monotonic.

    ``leg``: of a split request; this is then the instance that answers.
    """

    __slots__ = ("decision", "dispatch", "instance", "leg", "placed_s", "waited_s")

    def __init__(
        self,
        instance: Instance,
        decision: Decision,
        dispatch: Dispatch,
        placed_s: float,
        waited_s: float,
    ) -> None:
        self.instance = instance
        self.decision = decision
        self.dispatch = dispatch
        self.placed_s = placed_s
        self.waited_s = waited_s
        self.leg: PrefillLeg | None = None


def shorten_body(inbound: Inbound, job: Job | None) -> None:
    """Drop most of a long body; what is left still distinguishes it from others."""
    inbound.body = inbound.body[:_LEFT_BYTES] + inbound.body[-_LEFT_BYTES:]
    if job is not None and job.features is not None:
        job.features.body = inbound.body


class Intake:
    """Reads and describes requests.

    Args:
        config: of the gateway.
        limits: of bodies.
        fleet: has the served models, and their contexts.
        predictor, bytes_per_token, tokenizer: the length estimates; the last one may be None.
        prefix_secret: the start of prompt keys.

    Attributes:
        limits: of bodies.
        tokenizer: counts prompts; None: their tokens are estimated.
        readers: how bodies are read, and which fields clients may set.
        responses: those that others may continue.
        routes: aliases, and fallbacks if no instance can serve.
    """

    def __init__(
        self,
        config: GatewayConfig,
        limits: BodyLimits,
        fleet: Fleet,
        predictor: OutputLengthPredictor,
        bytes_per_token: BytesPerToken,
        tokenizer: Tokenizer | None,
        prefix_secret: bytes,
    ) -> None:
        self.limits = limits
        self._fleet = fleet
        self.predictor = predictor
        self._bytes_per_token = bytes_per_token
        self._names = seed_of(prefix_secret)
        self._keyed, self._isolates = (
            config.scheduler.prefix_cache,
            config.scheduler.isolate_clients,
        )
        self.begin_keys_with(prefix_secret)
        self._classes = config.clients.wanted
        self.set(config.scheduler, tokenizer)
        # Whether a response belongs to its client alone.
        self._owned = config.clients.wanted or config.scheduler.isolate_clients
        self.readers = BodyReaders(config.server.allow_engine_fields)
        self.responses = Responses()
        self.routes = ModelRoutes(config, fleet.contexts)

    def begin_keys_with(self, secret: bytes) -> None:
        """Use this as the start of prompt keys and of clients' salts from now on."""
        self._seed = seed_of(secret) if self._keyed else None
        self._tenants = Tenants(secret) if self._isolates else None

    def set(self, config: SchedulerConfig, tokenizer: Tokenizer | None) -> None:
        """Use other settings from now on."""
        self._image_tokens = config.tokens.image_tokens
        self._speech_tokens_per_s = config.tokens.speech_tokens_per_s
        self.tokenizer = tokenizer
        self._sessions = config.policy == "session"
        looked_at = ((_SESSION_HEADER, self._sessions), (CLASS_HEADER, self._classes))
        # The headers that ``describe`` looks at.
        self.described_headers = frozenset(name for name, looks in looked_at if looks)

    def read(self, inbound: Inbound, client: Client | None) -> ParsedRequest | None:
        """Read a complete body; its model is filled in.

        None: it is left to ``reading``, since it is long or a tokenizer counts.

        Raises:
            Refusal: 400 for an unusable one.
        """
        inbound.received_s = time.monotonic()
        if self.tokenizer is not None or len(inbound.body) >= LEAST_BYTES:
            return None
        if inbound.work is _LIGHT and (asked := self._asked(inbound, client)) is not None:
            return asked
        seed = self._seed
        if seed is not None and (self._tenants is not None or inbound.work is not _GENERATE):
            seed = self._seed_for(inbound)
        parsed = parse_body(inbound.body, inbound.content_type, inbound.path, seed, self.readers)
        if (
            parsed.model
            and not (parsed.form or parsed.previous or (self._owned and inbound.path == RESPONSES))
            and self._tenants is None
            and not self.routes.by_name
        ):
            return parsed  # no names need replacing
        return self._named(parsed, inbound, client)

    def read_in_steps(self, inbound: Inbound, client: Client | None) -> Steps[ParsedRequest]:
        """The same for a long body, in steps, so that the event loop is not blocked."""
        if inbound.work is _LIGHT and (asked := self._asked(inbound, client)) is not None:
            return asked
        parsed = yield from parse_in_steps(
            inbound.body, inbound.content_type, inbound.path, self._seed_for(inbound), self.readers
        )
        return self._named(parsed, inbound, client)

    def _asked(self, inbound: Inbound, client: Client | None) -> ParsedRequest | None:
        """A question to an instance about something it has; None: it is another request.

        It has a model, or a response whose model the scheduling process knows.
        """
        asked = asked_at(inbound.path)
        if asked is None:
            return None
        parsed = ParsedRequest("", False, None, 1, 0, 0, None, 1)
        if asked.response_id:
            parsed.previous = self.response_name(inbound, client, asked.response_id.encode())
        else:
            self._name_in_query(parsed, inbound)
        return parsed

    def look_at(self, path: str, body: bytes) -> tuple[ParsedRequest, int]:
        """Read a JSON body that is sent much later, and estimate its prompts' tokens.

        For a thread: it changes nothing. Raises Refusal: 400, 404.
        """
        parsed = parse_body(body, b"application/json", path, self._names, self.readers)
        if not parsed.model:
            parsed.model = self._default_model()
        return parsed, self._prompt_tokens(parsed.model, parsed, None)[0]

    def read_realtime(self, inbound: Inbound) -> ParsedRequest:
        """A WebSocket session, of which only the model is known. Raises Refusal."""
        parsed = ParsedRequest("", False, None, 1, 0, 0, None, 1)
        self._name_in_query(parsed, inbound)
        return parsed

    def _name_in_query(self, parsed: ParsedRequest, inbound: Inbound) -> None:
        query = inbound.target.partition(b"?")[2].decode("latin-1")
        try:
            named = parse_qs(query, max_num_fields=_MOST_QUERY_FIELDS).get("model")
        except ValueError as error:
            raise Refusal(400, "bad_request", "The query has too many fields.") from error
        if not named:
            parsed.model = self._default_model()
            return
        parsed.model = named[-1]
        if (model := self.routes.target(parsed.model, inbound)) is not None:
            parsed.asked, parsed.model = parsed.model, model

    def _seed_for(self, inbound: Inbound) -> int | None:
        """The start of its prompt's keys; None: it has no useful ones."""
        if self._seed is None or inbound.work is not _GENERATE:
            return None
        return self._seed if self._tenants is None else self._tenants.seed(inbound, self._seed)

    def _named(
        self, parsed: ParsedRequest, inbound: Inbound, client: Client | None
    ) -> ParsedRequest:
        if parsed.form:
            check_one_type(inbound.headers)
        if not parsed.model:
            parsed.model = self._default_model()
        elif self.routes.by_name:
            self._redirect(parsed, inbound)
        if self._tenants is not None and inbound.work is _GENERATE:
            inbound.body = self._tenants.salted(inbound, parsed.cache_salt)
        if inbound.path == RESPONSES and self._owned:
            self._keep_apart(parsed, inbound)
        if parsed.previous:
            parsed.previous = self.response_name(inbound, client, parsed.previous)
        return parsed

    def _keep_apart(self, parsed: ParsedRequest, inbound: Inbound) -> None:
        """Give a stored response a unique id that leads nowhere else.

        vLLM stores a response under the body's ``request_id``, replacing any other; other engines
        derive its id from the request's.

        Raises:
            Refusal: 400.
        """
        if parsed.stored:
            detail = (
                f"`{parsed.stored}` is not supported where clients have responses of their own."
            )
            raise Refusal(400, "unsupported_parameter", detail, param=parsed.stored)
        if inbound.request_id == inbound.asked_id:
            suffix = b"-" + os.urandom(_SUFFIX_BYTES).hex().encode()
            inbound.request_id = inbound.asked_id[: _MOST_REQUEST_ID_BYTES - len(suffix)] + suffix

    def _redirect(self, parsed: ParsedRequest, inbound: Inbound) -> None:
        """Make it ask for the model that its name stands for."""
        model = self.routes.target(parsed.model, inbound)
        if model is None:
            return
        parsed.asked = parsed.model or ""
        if model != parsed.model:
            parsed.model = model
            inbound.body = with_model(inbound.body, inbound.content_type, model)

    def response_name(self, inbound: Inbound, client: Client | None, response_id: bytes) -> bytes:
        """The name of a response in all processes of this gateway.

        Its owner's name is part of it, so that for another client it does not exist.

        Args:
            inbound, client: that made it, or ask for it.
        """
        seed = self._names
        if client is not None and client.name:
            seed = namespace(seed, client.name.encode())
        elif self._tenants is not None:
            seed = self._tenants.seed(inbound, seed)
        return namespace(seed, response_id).to_bytes(8, "little")

    def _default_model(self) -> str:
        # vLLM accepts a missing model, which is unambiguous if there is only one.
        models = sorted(self._fleet.models())
        if len(models) == 1:
            return models[0]
        detail = "you must provide a model parameter"
        if models:
            detail += f"; served: {', '.join(models[:5])}" + (", …" if len(models) > 5 else "")
        raise Refusal(400, "missing_required_parameter", detail, param="model")

    def _session(self, inbound: Inbound, parsed: ParsedRequest) -> int | None:
        """Its session: the same in every gateway, so that each finds the same instance."""
        for name, value in inbound.headers:
            if name == _SESSION_HEADER and value:
                return namespace(0, value)
        return namespace(0, parsed.session) if parsed.session not in _NO_SESSION else None

    def counts(self, inbound: Inbound, parsed: ParsedRequest) -> bool:
        """Whether the tokenizer should count the prompt."""
        return (
            self.tokenizer is not None
            and parsed.exact_prompt_tokens is None
            and parsed.text_bytes > 0
            and inbound.work is not _LIGHT
        )

    async def count(self, inbound: Inbound) -> int | None:
        """The prompt's tokens by the tokenizer; None: it has no text."""
        assert self.tokenizer is not None
        return await self.tokenizer.count(prompt_field(inbound.body))

    def describe(
        self, inbound: Inbound, client: Client, parsed: ParsedRequest, counted: int | None = None
    ) -> Job:
        """Describe the request: the lengths of prompt and output; ``counted``: tokens.

        Raises:
            Refusal: 403 for a model or a class that is not its client's.
        """
        if not parsed.model:
            return self._about_a_response(inbound, client, parsed)
        # What is kept of a request shares its model's name with the others.
        model = sys.intern(parsed.model)
        if client.models is not None:
            client.check_model(parsed.asked or model)
        party, request_class = client.party, client.request_class
        if client.classes:
            request_class = client.class_of(inbound.headers)
        if inbound.work is _LIGHT:
            if parsed.previous:
                self._previous(parsed)
            light = Request(model, 1, 0.0, streams=False, client=party)
            return Job(inbound, client, parsed, light, None, waits=False)
        tokens, exact = self._prompt_tokens(model, parsed, counted)
        prompt_tokens = max(1, -(-tokens // parsed.prompt_count))
        if parsed.most_prompt_tokens:
            prompt_tokens = min(prompt_tokens, parsed.most_prompt_tokens)
        if inbound.work is _PREFILL:
            # An engine may cut an input that is too long into pieces: nothing is certain.
            request = Request(
                model, prompt_tokens, 0.0, parsed.sequences, False, party,
                request_class=request_class,
            )  # fmt: skip
            return Job(inbound, client, parsed, request, None)
        certain_tokens = prompt_tokens if exact else 0
        limit, body = parsed.max_output_tokens, inbound.body
        keys = parsed.prefix
        beginning = keys.hashes[0] if keys is not None and keys.hashes else None
        features = LengthFeatures(model, prompt_tokens, limit, body, prompt_text, beginning)
        members = self._fleet.scheduler.members
        output_tokens = capped_output_tokens(
            self.predictor.predict(features),
            limit,
            (members.pools.get(model) or members.pool(model)).context_tokens,
            prompt_tokens,
        )
        streams = parsed.stream and starts_with_a_token(inbound.path)
        request = Request(
            model, prompt_tokens, output_tokens, parsed.sequences, streams, party,
            prefix=parsed.prefix, certain_tokens=certain_tokens + exact,
            session=self._session(inbound, parsed) if self._sessions else None,
            request_class=request_class,
        )  # fmt: skip
        if parsed.previous:
            request = self._continued(request, parsed)
        return Job(inbound, client, parsed, request, features)

    def _prompt_tokens(
        self, model: str, parsed: ParsedRequest, counted: int | None
    ) -> tuple[int, bool]:
        """(tokens of all its prompts, whether they are certain)."""
        given = parsed.exact_prompt_tokens
        tokens = given if given is not None else counted
        exact = False
        if tokens is None:
            tokens = self._bytes_per_token.tokens(model, parsed.text_bytes)
        elif given is not None and parsed.text_bytes:
            tokens += self._bytes_per_token.tokens(model, parsed.text_bytes)
        else:
            exact = not (parsed.media_parts or parsed.truncates)
        if parsed.speech_s:
            tokens += round(parsed.speech_s * self._speech_tokens_per_s)
        elif parsed.media_parts:
            tokens += parsed.media_parts * self._image_tokens
        return tokens, exact

    def _continued(self, request: Request, parsed: ParsedRequest) -> Request:
        """It continues a response: what precedes it, and where that is, if known."""
        before = self._previous(parsed)
        if before is None:
            return request.replace(prefix=None)
        return request.replace(
            prompt_tokens=request.prompt_tokens + before.tokens,
            prefix=before.prompt_after(parsed.prefix, parsed.head),
            only=before.instance_id,
        )

    def _previous(self, parsed: ParsedRequest) -> Response | None:
        """The response that a body continues; None: the engine decides.

        Raises:
            Refusal: 404 if it may be another client's.
        """
        before = self.responses.find(parsed.previous, time.monotonic())
        if before is None and self._owned:
            raise no_previous_response()
        return before

    def _about_a_response(self, inbound: Inbound, client: Client, parsed: ParsedRequest) -> Job:
        """It is asked of the instance that made the response. Raises Refusal: 404, 403."""
        found = self.responses.find(parsed.previous, time.monotonic())
        if found is None:
            raise no_response(inbound.path)
        client.check_model(found.model)
        request = Request(
            found.model, 1, 0.0, streams=False, client=client.party, only=found.instance_id
        )
        return Job(inbound, client, parsed, request, None, waits=False)

    def note_response(self, job: Job, instance_id: InstanceId, name: bytes) -> None:
        """A request is answered with a response of this name (``response_name``)."""
        request, parsed = job.request, job.parsed
        job.response = response = Response(
            *(name, instance_id, request.prompt_tokens, request.prefix, parsed.head, request.model),
            owner=job.client.name,
        )
        self.responses.note(response, time.monotonic())
