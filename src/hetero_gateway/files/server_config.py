"""``server``, ``timeouts`` and ``pool`` of the gateway's configuration: its sockets."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hetero_gateway.engines.vllm import GUARDED_FIELDS, GUARDED_HEADERS, is_guarded_header
from hetero_gateway.files.yaml_file import StrictModel

# Who may use a path: everybody, holders of a client's key, users of /admin, nobody.
Exposure = Annotated[
    Literal["open", "clients", "admin", "off"],
    # YAML takes a plain ``off`` for false.
    BeforeValidator(lambda value: "off" if value is False else value),
]


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
    """Who may use the non-engine paths other than /admin's."""

    metrics: Exposure | None = None
    """/metrics; default: open, or admin if clients have names."""
    docs: Exposure = "open"
    """/docs."""
    openapi: Exposure = "open"
    """/openapi.json."""
    dashboard: Exposure = "open"
    """/dashboard: a page that reads /admin."""


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
        default_factory=list, max_length=1024
    )
    """Their origins; *: any; none: no page."""
    max_age_s: int = Field(600, ge=0, le=86400)
    """How long a browser may keep the answer to a preflight."""


def _check_engine_field(value: str) -> str:
    if value not in GUARDED_FIELDS:
        raise ValueError(f"{value!r} is none of {', '.join(GUARDED_FIELDS)}")
    return value


def _check_engine_header(value: str) -> str:
    if not is_guarded_header(value.lower().encode()):
        raise ValueError(
            f"{value!r} is passed on anyway; withheld are those that begin with "
            + ", ".join(GUARDED_HEADERS)
        )
    return value.lower()


def check_certificate(config: Any) -> Any:
    """For settings with a certificate: raises ValueError if a required file is missing."""
    if (config.certificate_file is None) != (config.key_file is None):
        raise ValueError("certificate_file and key_file: one needs the other")
    if getattr(config, "client_ca_file", None) is not None and config.certificate_file is None:
        raise ValueError("client_ca_file: needs certificate_file")
    return config


class ServerConfig(StrictModel):
    """Where the gateway listens, and its limits."""

    host: str = "127.0.0.1"
    """Address to listen on; loopback unless changed."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port; 0 takes a free one."""
    client_socket: Path | None = None
    """Unix socket on which one process also serves clients; of mode 0660."""
    workers: int = Field(1, ge=1, le=256)
    """Processes that serve clients, with one scheduler process between them; 1: one process does
        everything."""
    worker_timeout_s: float = Field(30.0, ge=5, le=3600)
    """With several processes: one that is silent for so long is killed and restarted. One that is
        stopped by a signal is after two seconds."""
    max_body_bytes: int = Field(64 * 2**20, ge=1024)
    """Largest request body; a larger one gets 413."""
    max_buffered_bytes: int = Field(256 * 2**20, ge=1024)
    """Most bytes of request bodies above 64 KiB that are held at a time, over all requests; one
        more gets 503."""
    max_kept_bytes: int = Field(256 * 1024, ge=0)
    """Most bytes of an answer that are kept while it streams, so that it can be continued
        elsewhere; a longer one ends with its instance. 0: none is kept."""
    max_connections: int | None = Field(None, ge=1)
    """Most connections of clients; one more gets 503. Default: half of the descriptors that the
    process may open, at most 100 000."""
    api_key_env: str | None = None
    """Environment variable with the key that clients must send; none: open."""
    admin_key_env: str | None = None
    """Environment variable with the key of /admin; none, and no admin_listen: on loopback one is
        created at each start, elsewhere /admin is off."""
    admin_listen: Annotated[str, AfterValidator(_check_listen)] | None = None
    """A listener for /admin only: unix:PATH or HOST:PORT."""
    allow_engine_fields: list[Annotated[str, AfterValidator(_check_engine_field)]] = Field(
        default_factory=list, max_length=16
    )
    """Fields for an engine's machinery that clients may set in bodies nevertheless: of
        ``GUARDED_FIELDS``."""
    allow_engine_headers: list[Annotated[str, AfterValidator(_check_engine_header)]] = Field(
        default_factory=list, max_length=16
    )
    """Headers for an engine's machinery that are passed on nevertheless, by name."""
    expose: ExposeConfig = Field(default_factory=ExposeConfig)
    cors: CorsConfig = Field(default_factory=CorsConfig)
    link_local_instances: bool = False
    """Allow instances at link-local addresses, including metadata services."""
    certificate_file: Path | None = None
    """Certificate chain (PEM) for clients; none: no TLS."""
    key_file: Path | None = None
    """The certificate's private key (PEM)."""
    client_ca_file: Path | None = None
    """CA certificates (PEM): clients must show one of theirs; none: not required."""
    watch_files_s: float | None = Field(None, ge=0.1, le=3600)
    """How often to check whether this file, or one it names, has changed, and then reload; none:
        only when asked."""
    takeover_socket: Path | None = None
    """Unix socket at which `serve --takeover` asks the running gateway for its sockets; in a
        directory that belongs to its user alone. Default: next to the key of /admin, by host and
        port."""
    drain_s: float = Field(0.0, ge=0, le=600)
    """From turning unready on SIGTERM to taking no more connections, in seconds."""
    shutdown_timeout_s: float = Field(30.0, ge=0)
    """How long open requests may continue after SIGTERM, in seconds."""

    @property
    def lets_clients_choose_ranks(self) -> bool:
        """Whether a client's ``X-data-parallel-rank`` reaches engines."""
        names = [name.replace("_", "-") for name in self.allow_engine_headers]
        return "x-data-parallel-rank" in names

    _certified = model_validator(mode="after")(check_certificate)

    @model_validator(mode="after")
    def _check_client_socket(self) -> Self:
        if self.client_socket is not None and self.workers > 1:
            raise ValueError("client_socket: is served by one process; leave out workers")
        return self


class TimeoutsConfig(StrictModel):
    """All finite, all in seconds."""

    connect_s: float = Field(5.0, gt=0, le=600)
    """TCP and TLS handshake."""
    first_byte_s: float = Field(600.0, gt=0, le=86400)
    """From sending the request to the first response byte."""
    idle_s: float = Field(300.0, gt=0, le=86400)
    """Between two reads of a response that has begun."""
    total_s: float = Field(3600.0, gt=0, le=86400)
    """The whole exchange, including retries."""
    header_s: float = Field(30.0, gt=0, le=3600)
    """A client's request line and headers, from their start."""
    body_s: float = Field(30.0, gt=0, le=3600)
    """Between two reads of a request's body; and for the whole body, plus a second for every 500
        bytes."""
    write_s: float = Field(60.0, gt=0, le=3600)
    """How long a client may leave written data unread."""
    keep_alive_s: float = Field(75.0, gt=0, le=3600)
    """How long a client's connection may be idle."""


class PoolConfig(StrictModel):
    """Keep-alive connections to each instance."""

    max_connections: int = Field(4096, ge=1)
    """Most connections to one instance."""
    max_idle: int = Field(256, ge=0)
    """Idle connections kept for one instance."""
    idle_expiry_s: float = Field(4.0, gt=0)
    """Idle connections are closed after this; vLLM closes its end at 5 s."""
