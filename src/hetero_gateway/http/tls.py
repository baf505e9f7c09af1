"""TLS contexts: one for all instances with the same settings, and the server's own.

Making one reads the system's 140 authorities, which takes 45 ms and 0.9 MB; so they are cached by
what they were made from, and made in a thread if the event loop runs. Files replaced while serving
are read again into the existing context: later handshakes use them, open connections do not.
"""

import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import PickerConfig
from hetero_gateway.files.server_config import ServerConfig


class ClientTls(NamedTuple):
    """Settings of connections to an instance; None: the system's authorities, no identity.

    Args:
        ca_file: trusted authorities (PEM).
        certificate_file, key_file: our identity (PEM), both or neither.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    @property
    def files(self) -> list[Path]:
        return [path for path in self if path is not None]


class ClientContexts:
    """The contexts towards instances. Thread-safe: at worst one is made twice.

    Args:
        base_dir: what files are relative to.
    """

    def __init__(self, base_dir: Path) -> None:
        self._base_dir = base_dir
        self._contexts: dict[ClientTls, ssl.SSLContext] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def context(self, wanted: ClientTls) -> ssl.SSLContext:
        """The context of these settings. Raises ConfigError: a file cannot be used."""
        context = self._contexts.get(wanted)
        if context is None:
            context = self._made(wanted)
            context = self._contexts.setdefault(wanted, context)
        return context

    def _made(self, wanted: ClientTls) -> ssl.SSLContext:
        with _usable(f"ca_file: {wanted.ca_file}"):
            ca_file = None if wanted.ca_file is None else self._base_dir / wanted.ca_file
            context = ssl.create_default_context(cafile=ca_file)
        self._identify(context, wanted)
        context.set_alpn_protocols(["http/1.1"])
        return context

    def _identify(self, context: ssl.SSLContext, wanted: ClientTls) -> None:
        if wanted.certificate_file is not None and wanted.key_file is not None:
            certificate, key = wanted.certificate_file, wanted.key_file
            with _usable(f"certificate_file, key_file: {certificate} and {key}"):
                load_identity(context, self._base_dir / certificate, self._base_dir / key)

    def files(self) -> list[Path]:
        """All files that they were made from."""
        return [path for wanted in list(self._contexts) for path in wanted.files]

    def check(self) -> None:
        """Check that all files can be read again. May take a while; raises ConfigError."""
        for wanted in list(self._contexts):
            if wanted.files:
                self._made(wanted)

    def renew(self) -> None:
        """Read all files again; removed authorities stay trusted until the next start."""
        for wanted, context in self._contexts.items():
            self._identify(context, wanted)
            if wanted.ca_file is not None:
                context.load_verify_locations(self._base_dir / wanted.ca_file)


class ServerTls:
    """The server's side: its certificate, and the clients that it accepts.

    Args:
        files: certificate and key, our identity; and authorities, of which clients must show a
            certificate, if there are any (PEM).
        section: of the configuration, that names them.
        protocol: the protocol spoken (ALPN).

    Raises:
        ConfigError: a file cannot be used.
    """

    def __init__(self, files: list[Path], *, section: str, protocol: str) -> None:
        self.files = files
        self._certificate, self._key, *self._authorities = files
        self._section = section
        self._protocol = protocol
        self.context = self._made()

    def _made(self) -> ssl.SSLContext:
        context, section = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._section
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([self._protocol])
        certificate, key = self._certificate, self._key
        with _usable(f"{section}.certificate_file, {section}.key_file: {certificate} and {key}"):
            load_identity(context, certificate, key)
        for file in self._authorities:
            context.verify_mode = ssl.CERT_REQUIRED
            with _usable(f"{section}.client_ca_file: {file}"):
                context.load_verify_locations(file)
        return context

    def check(self) -> None:
        """Check that all files can be read again. Raises ConfigError."""
        self._made()

    def renew(self) -> None:
        """Read them again; removed authorities stay trusted until the next start."""
        load_identity(self.context, self._certificate, self._key)
        for file in self._authorities:
            self.context.load_verify_locations(file)


def server_tls(
    config: ServerConfig | PickerConfig, base_dir: Path, *, section: str, protocol: str
) -> ServerTls | None:
    """The TLS of a section; None: it names no certificate. Raises ConfigError."""
    named = (config.certificate_file, config.key_file, config.client_ca_file)
    files = [base_dir / file for file in named if file is not None]  # a key has a certificate
    return ServerTls(files, section=section, protocol=protocol) if files else None


@contextlib.contextmanager
def _usable(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"{what} cannot be used: {error}") from error


def load_identity(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Load our identity. Raises OSError, ValueError: not a pair, or not readable."""

    def no_password() -> str:
        # Without a callback, OpenSSL would ask for the password at the terminal.
        raise ValueError(f"{key} is encrypted; a key without a password is needed")

    context.load_cert_chain(certificate, key, password=no_password)
