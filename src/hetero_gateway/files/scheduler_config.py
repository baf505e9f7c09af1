"""``scheduler`` of the gateway's configuration: how instances are chosen, and who waits how."""

import re
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from hetero_gateway.core.nearest import nearest_names
from hetero_gateway.core.scheduling.discipline_settings import (
    DEFAULT_DISCIPLINE,
    DEFAULT_PATIENCE_S,
    DEFAULT_RESERVE,
    DisciplineName,
)
from hetero_gateway.files.model_names import ModelName
from hetero_gateway.files.yaml_file import StrictModel

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
# And those that bring a policy, here; docs/design/scheduling.md.
POLICY_GROUP = "hetero_gateway.policies"


def _check_policy(name: str) -> str:
    built_in = get_args(PolicyName)
    if name not in built_in:
        names = (*built_in, *sorted(installed(POLICY_GROUP)))
        if name not in names:
            near = nearest_names(name, names, 1, least=0.6)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"must be one of {', '.join(names)}{hint}")
    return name


class PredictorConfig(StrictModel):
    """How output lengths are predicted."""

    kind: str | None = None
    """bucket-mean (default), constant, normal (default of policy paper), trained, or the name of an
    installed one."""
    file: Path | None = None
    """trained: what `hetero-gateway predictor fit` wrote."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an installed predictor."""
    mean_tokens: float = Field(256.0, gt=0)
    """The prior, the constant, or the mean."""
    sd_tokens: float = Field(200.0, ge=0)
    """Standard deviation of `normal`, in tokens."""
    prior_requests: float = Field(8.0, gt=0)
    """The prior's weight, in finished requests."""

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, value: str | None) -> str | None:
        if value is None or value in BUILTIN_PREDICTORS:
            return value
        names = sorted(installed(PREDICTOR_GROUP))
        if value not in names:
            raise ValueError(
                f"no predictor is named {value!r}; there are {', '.join(BUILTIN_PREDICTORS)}, and "
                f"installed ones (entry points {PREDICTOR_GROUP}): {', '.join(names) or 'none'}"
            )
        return value

    @model_validator(mode="after")
    def _check_belongings(self) -> Self:
        if (self.file is not None) != (self.kind == "trained"):
            raise ValueError("file: kind trained needs one, and no other kind has one")
        if self.options and (self.kind is None or self.kind in BUILTIN_PREDICTORS):
            raise ValueError("options: only an installed predictor has any")
        return self


class TokensConfig(StrictModel):
    """How prompt lengths are estimated."""

    bytes_per_token: float = Field(4.0, gt=0)
    """Prior of the bytes-per-token ratio, learnt per model from usage."""
    image_tokens: int = Field(576, ge=0)
    """Tokens counted for one image, audio clip or video in a prompt."""
    speech_tokens_per_s: float = Field(100.0, ge=0, le=10_000)
    """Tokens counted for a second of an uploaded recording; 100 of Whisper, 12.5 of Voxtral."""
    tokenizer_file: Path | None = None
    """A tokenizer.json for exact counts, relative to this file; needs the extra `tokenizers`."""
    thread_above_bytes: int = Field(16384, ge=0)
    """Longer prompts are tokenized off the event loop."""


class QueueClassConfig(StrictModel):
    """The rights of a class of requests."""

    share: float = Field(gt=0, le=1e6)
    """Of the machines' time, relative to the others'."""
    max_wait_s: float | None = Field(None, gt=0, le=86400)
    """A request that has waited this long goes ahead of every class."""
    most_wait_s: float | None = Field(None, gt=0, le=86400)
    """Longest predicted wait; none: the queue's."""


class QueueConfig(StrictModel):
    """The queue of ``finish-time``; other policies have none."""

    discipline: DisciplineName = DEFAULT_DISCIPLINE
    """The order of waiting requests."""
    patience_s: float = Field(DEFAULT_PATIENCE_S, gt=0, le=86400)
    """shortest: a request never goes ahead of one that came this much earlier."""
    classes: dict[str, QueueClassConfig] = Field(default_factory=dict, max_length=64)
    """classes: name to share and max_wait_s; default: interactive 9, batch 1."""
    reserve: float = Field(DEFAULT_RESERVE, ge=0, le=0.9)
    """clients: share of each instance's seats and memory that a client with more than its part
        leaves free while others have asked recently."""
    most_wait_s: float | None = Field(None, gt=0, le=86400)
    """Longest predicted wait: else 429 at once. For batch, half of it; none: any."""
    shed_by_slo: bool = True
    """Without most_wait_s: 429 at once for requests that would wait beyond slo's ttft_s."""
    max_requests: int = Field(10_000, ge=1)
    """Most requests that wait at once; one more gets 429."""
    timeout_s: float = Field(600.0, gt=0, le=86400)
    """Longest wait for an instance; after it comes 429."""


def _check_shared(value: str) -> str:
    # Refused values are not quoted: they may contain a password.
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

    group: str = Field("hetero-gateway", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Gateways with the same group share; the keys begin with {group}."""
    interval_s: float = Field(0.05, ge=0.005, le=5)
    """Between two exchanges, in seconds."""
    news_s: float = Field(0.005, ge=0.001, le=5)
    """Others learn of a placement at once, then not again for this long."""
    ttl_s: float = Field(3.0, ge=0.2, le=60)
    """A gateway that has been silent for this long counts as gone; seconds."""
    timeout_s: float = Field(0.05, ge=0.005, le=5)
    """Timeout of one exchange, in seconds; nothing waits."""
    placements: bool = True
    """Also share where prompts were sent, as hashes of their beginnings."""
    password_env: str | None = None
    """Environment variable with the password of `shared`."""
    ca_file: Path | None = None
    """CA certificates for rediss://; default: the system's."""

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.ttl_s < 4 * self.interval_s:
            raise ValueError("ttl_s must be at least 4 times interval_s")
        return self


class SloLimits(StrictModel):
    """Limits for requests."""

    ttft_s: float | None = Field(None, gt=0, le=86400)
    """Until the first token, in seconds; default: no limit."""
    tpot_s: float | None = Field(None, gt=0, le=3600)
    """For each further token on average, in seconds; default: no limit."""


class SloConfig(SloLimits):
    """Limits that ``finish-time`` keeps as many requests within as it can."""

    models: dict[ModelName, SloLimits] = Field(default_factory=dict, max_length=256)
    """By model, replacing those above."""
    classes: dict[str, SloLimits] = Field(default_factory=dict, max_length=64)
    """By class of requests, replacing the model's."""


class SchedulerConfig(StrictModel):
    """The policy, and its constants."""

    policy: Annotated[str, AfterValidator(_check_policy)] = "finish-time"
    """The policy that chooses the instance: a built-in one, or an installed one."""
    policy_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an installed policy."""
    objective: Literal["latency", "makespan"] = "latency"
    """finish-time: keep latencies low, or the end of a batch early."""
    prefill_depth: int = Field(8, ge=1, le=4096)
    """finish-time: most sequences without a first token sent to one instance."""
    prefix_cache: bool = True
    """Remember which beginnings of prompts each instance has cached, by hashes."""
    kv_events: bool = True
    """Listen to engines' reports on their caches, if they send them; needs the extra
    `kv-events`."""
    first_token_weight: float = Field(2.0, ge=0, le=100)
    """finish-time: weight of a second until the first token, relative to a second of latency, for
        partly cached prompts."""
    slo: SloConfig | None = None
    """finish-time: limits that requests should be within; default: none."""
    prefix_key_env: str | None = None
    """Environment variable with the secret that hashes of prompts begin with; default: a random
        one, so that nothing outlives the process."""
    isolate_clients: bool = False
    """Each client key has prefix caches of its own: a cache_salt is added to its requests' bodies.
    """
    theta: float = Field(2.0, gt=0)
    """θ of Eq. (7); 2 in the paper."""
    seed: int = Field(0, ge=0)
    """Seed of tie-breaking and of random policies."""
    randomised: bool = False
    """Round-robin policies draw at random, as the paper says."""
    single_instance: str | None = None
    """Instance of policy single-instance; default: the first one."""
    reference_prompt_tokens: int = Field(512, ge=1)
    """Prompt of the request that fitted capacities are computed for."""
    reference_output_tokens: int = Field(256, ge=1)
    """Output of the request that fitted capacities are computed for."""
    recalibrate: bool = False
    """Let constants follow the traffic, within a factor of 4 of the profile's."""
    continue_streams: Literal["off", "text-safe", "all"] = "text-safe"
    """Streams that are continued elsewhere when their instance breaks off: none; plain text in
        which each token is drawn as it would have been; or all that can be joined into one stream,
        though a seed starts again and penalties forget earlier text."""
    split_requests: Literal["never", "each", "roles"] = "never"
    """finish-time: one instance may compute a request's prompt and another answer it, if both can
        (`instances[].kv_transfer`): by each request's own cost; or also by roles, found by
        simulating the recent mix, which may be no splitting. Only in a single process."""
    pairs_file: Path | None = None
    """Transfers measured by `profile --pairs`, relative to this file; none: as each instance's
        `kv_transfer` says."""
    wake_on_demand: bool = False
    """Wake an instance that sleeps (level 1) for a request that no other can take."""
    engine_priorities: dict[str, Annotated[int, Field(ge=-(2**31), lt=2**31)]] = Field(
        default_factory=dict, max_length=64
    )
    """For engines with --scheduling-policy priority: class of requests to the priority that is
        written into theirs; lower is sooner, 0 if it is not named."""
    shared: Annotated[str, AfterValidator(_check_shared)] | None = None
    """Redis or Valkey through which several gateways see each other's load."""
    sharing: SharingConfig = Field(default_factory=SharingConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
    predictor: PredictorConfig = Field(default_factory=PredictorConfig)
    tokens: TokensConfig = Field(default_factory=TokensConfig)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.policy_options and self.policy in get_args(PolicyName):
            raise ValueError("policy_options: only an installed policy has any")
        return self


def installed(group: str) -> dict[str, metadata.EntryPoint]:
    """The entries of installed packages, by name; none of them is imported."""
    return {point.name: point for point in metadata.entry_points(group=group)}
