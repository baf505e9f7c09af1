"""The gateway's configuration: its schema, its loader, and the environment variables of secrets.

The file is read by ``yaml_file``, which expands ``${NAME}`` and reports errors in one line; no
other modules read the environment. Precedence: flags over environment over file.
docs/reference/configuration.md lists every field; a test compares the two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.scheduling.disciplines import DEFAULT_PATIENCE_S, DisciplineName
from hetero_gateway.engines.vllm.answers import is_model_name
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.client_keys import ClientsConfig, read_clients
from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.files.link_local import is_link_local
from hetero_gateway.files.log_config import LogConfig, TracesConfig
from hetero_gateway.files.problems import Key, Misfits, Problems
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.yaml_file import StrictModel, parse_model, read_yaml

PolicyName = Literal[
    "finish-time",
    "min-max",
    "paper",
    "memory-based",
    "round-robin",
    "weighted-round-robin",
    "single-instance",
    "least-requests",
    "capacity-weighted",
    "least-work",
    "power-of-two",
    "prefix-affinity",
    "session",
]
BUILTIN_PREDICTORS = ("bucket-mean", "constant", "normal", "trained")
# Packages that bring a predictor of their own register it here; docs/design/predictors.md.
PREDICTOR_GROUP = "hetero_gateway.predictors"

# What may stand in a header and in a metric's label without surprise.
_INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _check_base_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://HOST[:PORT] or https://HOST[:PORT]")
    if parts.username or parts.password:
        raise ValueError("must not carry a user name or password; use api_key_env")
    if parts.query or parts.fragment:
        raise ValueError("must not carry a query or a fragment")
    # urlsplit drops line breaks without a word; a request's head must not get one.
    if any(not "!" <= character <= "~" for character in value):
        raise ValueError("must not contain spaces, control or non-ASCII characters")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError("must not end in /v1: the paths that clients ask for are appended")
    if parts.port == 0:
        raise ValueError("must not have port 0")
    return value.rstrip("/")


# Who may ask for a path: everybody, who has a client's key, who may use /admin, nobody.
Exposure = Literal["open", "clients", "admin", "off"]


def _check_listen(value: str) -> str:
    if value.startswith("unix:"):
        if not 1 <= len(value.removeprefix("unix:").encode()) <= 100:
            raise ValueError("must be unix:PATH, of at most 100 bytes")
        return value
    parts = urlsplit("//" + value)
    if parts.path or not parts.hostname or parts.username is not None or parts.port is None:
        raise ValueError("must be unix:PATH or HOST:PORT")
    return value


class ExposeConfig(StrictModel):
    """Who may ask for the paths that are no engine's and not /admin's."""

    metrics: Exposure | None = Field(
        None, description="/metrics; default: open, or admin where clients have names."
    )
    docs: Exposure = Field("open", description="/docs.")
    openapi: Exposure = Field("open", description="/openapi.json.")
    dashboard: Exposure = Field("open", description="/dashboard: a page that reads /admin.")


def _check_origin(value: str) -> str:
    value = value.lower()
    parts = urlsplit(value)
    named = value == f"{parts.scheme}://{parts.netloc}" and parts.hostname and "@" not in value
    if value != "*" and not (named and len(value) <= 256 and value.isascii()):
        raise ValueError("must be * or an origin: https://HOST[:PORT], without a path")
    return value


class CorsConfig(StrictModel):
    """Which web pages may use the gateway from a browser; never /admin."""

    origins: list[Annotated[str, AfterValidator(_check_origin)]] = Field(
        default_factory=list, max_length=1024, description="Their origins; *: any; none: no page."
    )
    max_age_s: int = Field(
        600, ge=0, le=86400, description="How long a browser may keep the answer to a preflight."
    )


class ServerConfig(StrictModel):
    """Where the gateway listens, and what it accepts."""

    host: str = Field("127.0.0.1", description="Address to listen on; loopback unless changed.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that serve clients, with one scheduler process between them; 1: one "
        "process does all.",
    )
    max_body_bytes: int = Field(
        64 * 2**20, ge=1024, description="Largest request body; a larger one gets 413."
    )
    max_buffered_bytes: int = Field(
        512 * 2**20,
        ge=1024,
        description="Most bytes of request bodies above 64 KiB that are held at a time, over all "
        "requests; one more gets 503.",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        description="Most connections of clients; one more gets 503. Default: half of the "
        "descriptors that the process may open, at most 100 000.",
    )
    api_key_env: str | None = Field(
        None, description="Environment variable with the key that clients must send; none: open."
    )
    admin_key_env: str | None = Field(
        None, description="Environment variable with the key of /admin."
    )
    admin_listen: Annotated[str, AfterValidator(_check_listen)] | None = Field(
        None, description="A listener for /admin alone: unix:PATH or HOST:PORT."
    )
    expose: ExposeConfig = Field(default_factory=ExposeConfig)
    cors: CorsConfig = Field(default_factory=CorsConfig)
    link_local_instances: bool = Field(
        False, description="Allow instances at link-local addresses, metadata services included."
    )
    certificate_file: Path | None = Field(
        None, description="Certificate chain (PEM): clients are served by TLS; none: without."
    )
    key_file: Path | None = Field(None, description="The certificate's private key (PEM).")
    client_ca_file: Path | None = Field(
        None, description="CA certificates (PEM): clients must show one of theirs; none: any may."
    )
    watch_files_s: float | None = Field(
        None,
        ge=0.1,
        le=3600,
        description="Look so often whether this file, or one that it names, has changed, and "
        "reload then; none: only when asked.",
    )
    drain_s: float = Field(
        0.0,
        ge=0,
        le=600,
        description="From turning unready on SIGTERM to taking no more connections, in seconds.",
    )
    shutdown_timeout_s: float = Field(
        30.0, ge=0, description="How long open requests may go on after SIGTERM, in seconds."
    )

    @model_validator(mode="after")
    def _check_tls(self) -> ServerConfig:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file: one needs the other")
        if self.client_ca_file is not None and self.certificate_file is None:
            raise ValueError("client_ca_file: needs certificate_file")
        return self


class PredictorConfig(StrictModel):
    """How output lengths are predicted."""

    kind: str | None = Field(
        None,
        description="bucket-mean (default), constant, normal (default of policy paper), trained, "
        "or the name of an installed one.",
    )
    file: Path | None = Field(
        None, description="trained: what `hetero-gateway predictor fit` wrote."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="What an installed predictor is made with."
    )
    mean_tokens: float = Field(256.0, gt=0, description="The prior, the constant, or the mean.")
    sd_tokens: float = Field(200.0, ge=0, description="Standard deviation of `normal`, in tokens.")
    prior_requests: float = Field(
        8.0, gt=0, description="How many finished requests the prior weighs as much as."
    )

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, value: str | None) -> str | None:
        if value is None or value in BUILTIN_PREDICTORS:
            return value
        installed = sorted(predictor_entry_points())
        if value not in installed:
            raise ValueError(
                f"no predictor is named {value!r}; there are {', '.join(BUILTIN_PREDICTORS)}, and "
                f"installed ones (entry points {PREDICTOR_GROUP}): {', '.join(installed) or 'none'}"
            )
        return value

    @model_validator(mode="after")
    def _check_belongings(self) -> PredictorConfig:
        if (self.file is not None) != (self.kind == "trained"):
            raise ValueError("file: kind trained needs one, and no other kind has one")
        if self.options and (self.kind is None or self.kind in BUILTIN_PREDICTORS):
            raise ValueError("options: only an installed predictor has any")
        return self


class TokensConfig(StrictModel):
    """How prompt lengths are estimated."""

    bytes_per_token: float = Field(
        4.0, gt=0, description="Prior of the bytes-per-token ratio, learnt per model from usage."
    )
    image_tokens: int = Field(
        576, ge=0, description="Tokens counted for one image, audio clip or video in a prompt."
    )
    tokenizer_file: Path | None = Field(
        None, description="A tokenizer.json for exact counts; needs the `tokenizers` extra."
    )
    thread_above_bytes: int = Field(
        16384, ge=0, description="Longer prompts are tokenized off the event loop."
    )


class QueueClassConfig(StrictModel):
    """What a class of requests gets."""

    share: float = Field(gt=0, le=1e6, description="Of the machines' time, beside the others'.")
    max_wait_s: float | None = Field(
        None, gt=0, le=86400, description="Who has waited so long goes ahead of every class."
    )
    most_wait_s: float | None = Field(
        None, gt=0, le=86400, description="Longest predicted wait; none: the queue's."
    )


class QueueConfig(StrictModel):
    """The queue of ``finish-time``; other policies have none."""

    discipline: DisciplineName = Field("fifo", description="Who is next of those that wait.")
    patience_s: float = Field(
        DEFAULT_PATIENCE_S,
        gt=0,
        le=86400,
        description="shortest: who comes so much later than another does not go ahead of it.",
    )
    classes: dict[str, QueueClassConfig] = Field(
        default_factory=dict,
        max_length=64,
        description="classes: name to share and max_wait_s; default: interactive 9, batch 1.",
    )
    most_wait_s: float | None = Field(
        None,
        gt=0,
        le=86400,
        description="Longest predicted wait: else 429 at once. Of batch, half of it; none: any.",
    )
    max_requests: int = Field(
        10_000, ge=1, description="Most requests that wait at once; one more gets 429."
    )
    timeout_s: float = Field(
        600.0, gt=0, le=86400, description="Longest wait for an instance; after it comes 429."
    )


def _check_shared(value: str) -> str:
    # What is refused is not quoted: it may hold a password.
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in ("redis", "rediss", "valkey", "valkeys") or not parts.hostname:
        raise ValueError("must be redis://HOST[:PORT][/DB], or rediss:// for TLS")
    if parts.password is not None:
        raise ValueError(
            "must not carry a password; name its environment variable in "
            "scheduler.sharing.password_env"
        )
    if parts.query or parts.fragment or port == 0:
        raise ValueError("must not carry a query, a fragment or port 0")
    if any(not "!" <= character <= "~" for character in value):
        raise ValueError("must not contain spaces, control or non-ASCII characters")
    if not re.fullmatch(r"/?|/[0-9]{1,5}", parts.path):
        raise ValueError("has a path that is no database number")
    return value


class SharingConfig(StrictModel):
    """How gateways share their load through ``shared``."""

    group: str = Field(
        "hetero-gateway",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Gateways with the same group share; the keys begin with {group}.",
    )
    interval_s: float = Field(
        0.05, ge=0.005, le=5, description="Between two exchanges, in seconds."
    )
    news_s: float = Field(
        0.005,
        ge=0.001,
        le=5,
        description="Others learn at once where a request went, then not again for this long.",
    )
    ttl_s: float = Field(
        3.0, ge=0.2, le=60, description="A gateway that is silent for so long is gone; seconds."
    )
    timeout_s: float = Field(
        0.05, ge=0.005, le=5, description="Time-out of one exchange, in seconds; nothing waits."
    )
    password_env: str | None = Field(
        None, description="Environment variable with the password of `shared`."
    )
    ca_file: Path | None = Field(
        None, description="CA certificates for rediss://; default: the system's."
    )

    @model_validator(mode="after")
    def _check_times(self) -> SharingConfig:
        if self.ttl_s < 4 * self.interval_s:
            raise ValueError("ttl_s must be at least 4 times interval_s")
        return self


class SloLimits(StrictModel):
    """What requests should be within."""

    ttft_s: float | None = Field(
        None, gt=0, le=86400, description="Until the first token, in seconds; default: no limit."
    )
    tpot_s: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="For each further token, in the mean, in seconds; default: no limit.",
    )


class SloConfig(SloLimits):
    """Limits that ``finish-time`` keeps as many requests within as it can."""

    models: dict[str, SloLimits] = Field(
        default_factory=dict,
        max_length=256,
        description="By model, in place of those above.",
    )
    classes: dict[str, SloLimits] = Field(
        default_factory=dict,
        max_length=64,
        description="By class of requests, in place of the model's.",
    )


class SchedulerConfig(StrictModel):
    """Which policy chooses, and its constants."""

    policy: PolicyName = Field("finish-time", description="The policy that chooses the instance.")
    objective: Literal["latency", "makespan"] = Field(
        "latency", description="finish-time: keep latencies low, or the end of a batch early."
    )
    prefill_depth: int = Field(
        8,
        ge=1,
        le=4096,
        description="finish-time: most sequences without a first token sent to one instance.",
    )
    prefix_cache: bool = Field(
        True,
        description="Keep in mind which beginnings of prompts each instance has cached, by hashes.",
    )
    first_token_weight: float = Field(
        1.0,
        ge=0,
        le=100,
        description="finish-time: what a second until the first token counts beside a second of "
        "latency, for prompts of which something is cached.",
    )
    slo: SloConfig | None = Field(
        None, description="finish-time: limits that requests should be within; default: none."
    )
    prefix_key_env: str | None = Field(
        None,
        description="Environment variable with the secret that hashes of prompts begin with; "
        "default: a random one, so that nothing outlives the process.",
    )
    isolate_clients: bool = Field(
        False,
        description="Each client key has prefix caches of its own: a cache_salt is added to its "
        "requests' bodies.",
    )
    theta: float = Field(2.0, gt=0, description="θ of Eq. (7); 2 in the paper.")
    seed: int = Field(0, ge=0, description="Seed of tie-breaking and of random policies.")
    randomised: bool = Field(
        False, description="Round-robin policies draw at random, as the paper says."
    )
    single_instance: str | None = Field(
        None, description="Instance of policy single-instance; default: the first one."
    )
    reference_prompt_tokens: int = Field(
        512, ge=1, description="Prompt of the request that fitted capacities are computed for."
    )
    reference_output_tokens: int = Field(
        256, ge=1, description="Output of the request that fitted capacities are computed for."
    )
    recalibrate: bool = Field(
        False,
        description="Let constants follow the traffic, within a factor of 4 of the profile's.",
    )
    wake_on_demand: bool = Field(
        False,
        description="Wake an instance that sleeps (level 1) for a request that no other can take.",
    )
    shared: Annotated[str, AfterValidator(_check_shared)] | None = Field(
        None,
        description="Redis or Valkey through which several gateways see each other's load; needs "
        "the `redis` extra.",
    )
    sharing: SharingConfig = Field(default_factory=SharingConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
    predictor: PredictorConfig = Field(default_factory=PredictorConfig)
    tokens: TokensConfig = Field(default_factory=TokensConfig)


class TimeoutsConfig(StrictModel):
    """All finite, all in seconds."""

    connect_s: float = Field(5.0, gt=0, le=600, description="TCP and TLS handshake.")
    first_byte_s: float = Field(
        600.0, gt=0, le=86400, description="From sending the request to the first response byte."
    )
    idle_s: float = Field(
        300.0, gt=0, le=86400, description="Between two reads of a response that has begun."
    )
    total_s: float = Field(
        3600.0, gt=0, le=86400, description="The whole exchange, retries and all."
    )
    header_s: float = Field(
        30.0, gt=0, le=3600, description="A client's request line and headers, from their start."
    )
    body_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Between two reads of a request's body, and the whole of it with a second "
        "more for every 500 bytes.",
    )
    write_s: float = Field(
        60.0, gt=0, le=3600, description="How long a client may read nothing of what was written."
    )
    keep_alive_s: float = Field(
        75.0, gt=0, le=3600, description="How long a client's connection may be idle."
    )


class RetryConfig(StrictModel):
    """What happens when an attempt fails before the first response byte."""

    max_attempts: int = Field(
        3, ge=1, le=16, description="Attempts per request, each on another instance."
    )
    budget_ratio: float = Field(
        0.2, ge=0, le=1, description="Retries allowed as a share of recent requests."
    )
    budget_min: int = Field(10, ge=0, description="Retries always allowed in each window of 10 s.")


class PoolConfig(StrictModel):
    """Keep-alive connections to each instance."""

    max_connections: int = Field(4096, ge=1, description="Most connections to one instance.")
    max_idle: int = Field(256, ge=0, description="Idle connections kept for one instance.")
    idle_expiry_s: float = Field(
        4.0, gt=0, description="Idle connections are closed after this; vLLM closes its end at 5 s."
    )


class EjectionConfig(StrictModel):
    """When an instance whose requests fail gets none for a while; docs/design/reliability.md."""

    enabled: bool = Field(True, description="Whether failed requests count against instances.")
    consecutive_failures: int = Field(
        5, ge=1, le=10_000, description="So many in a row eject an instance."
    )
    failure_ratio: float = Field(
        0.5, gt=0, le=1, description="Or such a share of what came of its requests within 10 s,"
    )
    min_outcomes: int = Field(10, ge=1, le=10_000, description="once there were this many.")
    base_s: float = Field(
        2.0,
        gt=0,
        le=3600,
        description="The first ejection's length; each in succession doubles it.",
    )
    max_s: float = Field(60.0, gt=0, le=86400, description="The longest ejection.")


class HealthConfig(StrictModel):
    """Active probes and scrapes of the instances."""

    probe_interval_s: float = Field(2.0, gt=0, description="Between two GET /health.")
    probe_timeout_s: float = Field(2.0, gt=0, description="Time-out of one probe.")
    unhealthy_after: int = Field(2, ge=1, description="Failed probes in a row that mark it down.")
    scrape_interval_s: float = Field(
        5.0, gt=0, description="Between two reads of the engine's /metrics and /v1/models."
    )
    ejection: EjectionConfig = Field(default_factory=EjectionConfig)


class InstanceConfig(StrictModel):
    """One running vLLM server."""

    id: str = Field(description="Unique name: letters, digits, dot, dash, underscore; at most 63.")
    base_url: Annotated[str, AfterValidator(_check_base_url)] = Field(
        description="Where it listens, without /v1."
    )
    model: str | list[str] | None = Field(
        None, description="Name or names it serves; asked of its /v1/models when absent."
    )
    profile: str | None = Field(
        None, description="Built-in profile name, or a profile file; absent: unprofiled."
    )
    weight: float = Field(
        1.0,
        ge=1e-3,
        le=1e3,
        description="For weighted-round-robin, and for unprofiled instances; 0.001 to 1000.",
    )
    api_key_env: str | None = Field(
        None, description="Environment variable with the key that this instance wants."
    )
    ca_file: Path | None = Field(
        None, description="CA certificates for https; default: the system's."
    )
    certificate_file: Path | None = Field(
        None, description="Certificate chain (PEM) that the gateway shows to this instance."
    )
    key_file: Path | None = Field(None, description="The certificate's private key (PEM).")

    @model_validator(mode="after")
    def _check_pair(self) -> InstanceConfig:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file: one needs the other")
        return self

    @field_validator("id")
    @classmethod
    def _check_id(cls, value: str) -> str:
        if not _INSTANCE_ID.fullmatch(value):
            raise ValueError(
                "must be 1 to 63 letters, digits, dots, dashes or underscores, starting with a "
                "letter or digit"
            )
        return value

    @field_validator("model")
    @classmethod
    def _check_model(cls, value: str | list[str] | None) -> str | list[str] | None:
        names = [value] if isinstance(value, str) else value
        if names is not None and not (names and all(names)):
            raise ValueError("must be a name or a list of names; leave it out to ask the instance")
        return value

    @property
    def models(self) -> frozenset[str]:
        if self.model is None:
            return frozenset()
        return frozenset([self.model] if isinstance(self.model, str) else self.model)


def _check_model_name(value: str) -> str:
    if not is_model_name(value):
        raise ValueError("must be printable, and of 1 to 256 characters")
    return value


ModelName = Annotated[str, AfterValidator(_check_model_name)]


class FallbackConfig(StrictModel):
    """Who answers where no instance of a model can: another model here, or another service."""

    model: ModelName = Field(description="Its name there; the body's `model` is rewritten.")
    base_url: Annotated[str, AfterValidator(_check_base_url)] | None = Field(
        None, description="An OpenAI-compatible service elsewhere, without /v1; none: here."
    )
    api_key_env: str | None = Field(
        None, description="Environment variable with the key that this service wants."
    )
    ca_file: Path | None = Field(
        None, description="CA certificates for https; default: the system's."
    )

    @model_validator(mode="after")
    def _check_elsewhere(self) -> FallbackConfig:
        if self.base_url is None and (self.api_key_env or self.ca_file):
            raise ValueError("api_key_env and ca_file are for a base_url")
        return self


class ModelConfig(StrictModel):
    """What becomes of requests for a name."""

    serve: ModelName | None = Field(
        None, description="The model that it stands for; the body's `model` is rewritten."
    )
    split: dict[ModelName, Annotated[float, Field(gt=0, le=1e6)]] = Field(
        default_factory=dict, max_length=16, description="Several models, each with its weight."
    )
    split_by: Literal["request", "client"] = Field(
        "request", description="What decides: a hash of the request's id, or of the client's key."
    )
    fallbacks: list[FallbackConfig] = Field(
        default_factory=list, max_length=8, description="Who is asked, in turn, if no instance can."
    )

    @model_validator(mode="after")
    def _check_one(self) -> ModelConfig:
        if self.serve is not None and self.split:
            raise ValueError("serve and split: one of them")
        return self


class PickerConfig(StrictModel):
    """``hetero-gateway picker``: where Envoy asks for an instance; ``serve`` ignores it."""

    host: str = Field("127.0.0.1", description="Address of ext_proc; loopback unless changed.")
    port: int = Field(9002, ge=0, le=65535, description="Port of ext_proc; 0 takes a free one.")
    health_port: int | None = Field(
        None, ge=1, le=65535, description="One more port that answers gRPC health checks only."
    )
    certificate_file: Path | None = Field(
        None, description="Certificate chain (PEM) of ext_proc; none: without TLS."
    )
    key_file: Path | None = Field(None, description="The certificate's private key (PEM).")
    resolve_interval_s: float = Field(
        5.0, gt=0, le=3600, description="Between two look-ups of an instance's host name."
    )
    extend_timeouts: bool = Field(
        True,
        description="Ask Envoy for more time (override_message_timeout) while a request waits.",
    )
    drain_s: float = Field(
        3.0, ge=0, le=600, description="From turning unready on SIGTERM to taking no more streams."
    )

    @model_validator(mode="after")
    def _check_pair(self) -> PickerConfig:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file: one needs the other")
        return self


class GatewayConfig(StrictModel):
    """The whole file."""

    server: ServerConfig = Field(default_factory=ServerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    retry: RetryConfig = Field(default_factory=RetryConfig)
    pool: PoolConfig = Field(default_factory=PoolConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    picker: PickerConfig = Field(default_factory=PickerConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    traces: TracesConfig = Field(default_factory=TracesConfig)
    discovery: list[SourceConfig] = Field(
        default_factory=list, description="Sources of instances besides this file."
    )
    clients: ClientsConfig = Field(default_factory=ClientsConfig)
    models: dict[ModelName, ModelConfig] = Field(
        default_factory=dict, max_length=1024, description="Aliases, splits, fallbacks, by name."
    )
    instances: list[InstanceConfig] = Field(
        default_factory=list, description="The instances; more can be added over /admin/instances."
    )

    @model_validator(mode="after")
    def _check_models(self) -> GatewayConfig:
        stands_for_others = {name for name, each in self.models.items() if each.serve or each.split}
        for name, each in self.models.items():
            here = [f.model for f in each.fallbacks if f.base_url is None]
            for other in (*filter(None, [each.serve]), *each.split, *here):
                if other in stands_for_others and not (other == name and other in each.split):
                    raise ValueError(f"models.{name}: {other!r} stands for another one itself")
            if each.serve is None and not each.split and name in here:
                raise ValueError(f"models.{name}: it cannot be its own fallback")
            for fallback in each.fallbacks:
                if fallback.base_url is not None and not self.server.link_local_instances:
                    check_reachable(fallback.base_url)
        return self

    @model_validator(mode="after")
    def _check_ids(self) -> GatewayConfig:
        found: list[tuple[Key, str]] = []
        seen: set[str] = set()
        for i, instance in enumerate(self.instances):
            if instance.id in seen:
                found.append((("instances", i, "id"), f"{instance.id!r} is used twice"))
            seen.add(instance.id)
            if not self.server.link_local_instances:
                try:
                    check_reachable(instance.base_url)
                except ValueError as error:
                    text = str(error).removeprefix("base_url: ")
                    found.append((("instances", i, "base_url"), text))
        names: set[str] = {"file", "admin"}
        for i, source in enumerate(self.discovery):
            if source.name in names:
                found.append((("discovery", i, "name"), f"{source.name!r} is used twice, or taken"))
            names.add(source.name)
        single = self.scheduler.single_instance
        if single is not None and single not in seen:
            found.append((("scheduler", "single_instance"), f"no instance has the id {single!r}"))
        if found:
            raise Misfits(found)
        return self


def load_gateway_config(path: Path, overrides: Mapping[str, Any] | None = None) -> GatewayConfig:
    """Read and check a gateway configuration, its profiles included.

    Args:
        path: the YAML file.
        overrides: dotted keys from the command line, e.g. ``{"server.port": 9000}``; None values
            are ignored.

    Raises:
        ConfigError: one line with the file and the key.
    """
    data = read_yaml(path)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            _set_dotted(data, dotted, value)
    config = parse_model(GatewayConfig, data, str(path))
    problems = Problems(str(path), data)
    for i, instance in enumerate(config.instances):
        try:
            instance_profile(instance, path.parent)
        except ConfigError as error:
            problems.add(("instances", i, "profile"), str(error))
    try:
        read_clients(config.clients, path.parent)
    except ConfigError as error:
        problems.add(("clients",), str(error))
    if (file := config.scheduler.predictor.file) is not None:
        # Imported here: few have one, and all who only validate are spared numpy.
        from hetero_gateway.files.length_model_file import read_length_model

        try:
            read_length_model(path.parent / file)
        except ConfigError as error:
            problems.add(("scheduler", "predictor", "file"), str(error))
    for key, variable, read in _named_secrets(config):
        try:
            read(variable, "")
        except ConfigError as error:
            problems.add(key, str(error).removeprefix(": "))
    problems.raise_any()
    return config


def check_reachable(base_url: str) -> None:
    """Raises ValueError: an instance is not let be there, by its address or name."""
    host = urlsplit(base_url).hostname or ""
    if is_link_local(host):
        raise ValueError(
            f"base_url: {host} is link-local or a cloud's metadata service; allow such addresses "
            "with server.link_local_instances"
        )


def _named_secrets(
    config: GatewayConfig,
) -> Iterator[tuple[Key, str | None, Callable[[str | None, str], str | None]]]:
    """The variables of the environment that a configuration names: (key, name, how it is read)."""
    server, scheduler = config.server, config.scheduler
    yield ("server", "api_key_env"), server.api_key_env, secret
    yield ("server", "admin_key_env"), server.admin_key_env, secret
    yield ("clients", "hash_key_env"), config.clients.hash_key_env, secret
    yield ("scheduler", "prefix_key_env"), scheduler.prefix_key_env, secret
    yield ("scheduler", "sharing", "password_env"), scheduler.sharing.password_env, password
    for name, each in config.models.items():
        for i, fallback in enumerate(each.fallbacks):
            yield ("models", name, "fallbacks", i, "api_key_env"), fallback.api_key_env, secret
    for i, instance in enumerate(config.instances):
        yield ("instances", i, "api_key_env"), instance.api_key_env, secret


def has_gateway_keys(data: Mapping[str, Any]) -> bool:
    """Whether a file has a section that only a gateway's has."""
    return bool(set(data) & set(GatewayConfig.model_fields) - {"instances"})


def predictor_entry_points() -> dict[str, metadata.EntryPoint]:
    """The predictors that installed packages bring, by name; none of them is imported."""
    return {point.name: point for point in metadata.entry_points(group=PREDICTOR_GROUP)}


def instance_profile(instance: InstanceConfig, base_dir: Path) -> Profile | None:
    """The profile that an instance names, or None when it names none."""
    return None if instance.profile is None else load_profile(instance.profile, base_dir)


def secret(env_name: str | None, key: str) -> str | None:
    """The value of the environment variable that holds a key, or None when none is named.

    Raises:
        ConfigError: the variable is named but not set: refusing is safer than running open.
    """
    if env_name is None:
        return None
    value = os.environ.get(env_name)
    if not value:
        raise ConfigError(f"{key}: the environment variable {env_name} is not set")
    if not (value.isascii() and value.isprintable()) or " " in value:
        raise ConfigError(
            f"{key}: the environment variable {env_name} holds a space, a line end or another "
            "character that cannot stand in a header"
        )
    return value


def password(env_name: str | None, key: str) -> str | None:
    """The value of the environment variable that holds a password, or None when none is named.

    Raises:
        ConfigError: the variable is named but not set.
    """
    if env_name is None:
        return None
    value = os.environ.get(env_name)
    if not value:
        raise ConfigError(f"{key}: the environment variable {env_name} is not set")
    return value


def _set_dotted(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        child = data.setdefault(name, {})
        if not isinstance(child, dict):
            return  # the schema will say what is wrong with it
        data = child
    data[last] = value
