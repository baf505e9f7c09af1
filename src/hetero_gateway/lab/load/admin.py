"""Requests to a running gateway's /admin."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hetero_gateway.errors import ConfigError, HeteroGatewayError
from hetero_gateway.lab.load.unreachable import why_unreachable

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 10.0


def fetch_document(
    url: str, admin_key_env: str | None, path: str, params: dict[str, Any]
) -> dict[str, Any]:
    """The answer to GET ``path``.

    Raises:
        ConfigError: the URL is invalid, or the key's variable is not set.
        HeteroGatewayError: not reachable, refused, or not a gateway.
    """
    return _dict_in(url, _ask(url, admin_key_env, path, params=params))


def change_document(
    url: str, admin_key_env: str | None, path: str, change: dict[str, Any]
) -> dict[str, Any]:
    """The answer to PATCH ``path``. Raises as ``fetch_document`` does."""
    return _dict_in(url, _ask(url, admin_key_env, path, "PATCH", json=change))


def fetch_csv(url: str, admin_key_env: str | None, path: str) -> str:
    """The table at ``path``. Raises as ``fetch_document`` does."""
    response = _ask(url, admin_key_env, path)
    if response.is_success and response.headers.get("content-type", "").startswith("text/csv"):
        return response.text
    raise HeteroGatewayError(f"{url}: {_refusal(response, _document(response))}")


def _dict_in(url: str, response: httpx.Response) -> dict[str, Any]:
    document = _document(response)
    if response.is_success and isinstance(document, dict):
        return document
    raise HeteroGatewayError(f"{url}: {_refusal(response, document)}")


def _ask(
    url: str, admin_key_env: str | None, path: str, method: str = "GET", **more: Any
) -> httpx.Response:
    # Imported here so that --help stays quick.
    from hetero_gateway.files.admin_key import find
    from hetero_gateway.files.secrets import secret
    from hetero_gateway.plain_httpx import httpx

    if not _is_address(url):
        raise ConfigError("URL: must be http://HOST:PORT or https://HOST:PORT, and hold no key")
    url = url.rstrip("/").removesuffix("/v1")  # as given to clients
    address, headers = url, {}
    if (key := secret(admin_key_env, "--admin-key-env")) is not None:
        headers = bearer(key)
    elif (found := find(url)) is not None:
        address, headers = found.url, bearer(found.key)
    try:
        # trust_env: a proxy of the environment would get the key.
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=_trusted()) as client:
            return client.request(method, address.rstrip("/") + path, headers=headers, **more)
    except httpx.LocalProtocolError:
        raise ConfigError(f"--admin-key-env: {admin_key_env} is no valid key") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = why_unreachable(url, error)
        raise HeteroGatewayError(f"{url}: the gateway does not answer: {reason}") from error


def _trusted() -> ssl.SSLContext | bool:
    """The trusted certificates: those of SSL_CERT_FILE or SSL_CERT_DIR, which ``--ca-file`` sets;
    else httpx's own."""
    named = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")
    return ssl.create_default_context() if named else True  # OpenSSL looks there itself


def bearer(key: str) -> dict[str, str]:
    """The header fields that send a key."""
    return {"authorization": f"Bearer {key}"}


def _document(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username


def _refusal(response: httpx.Response, document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        return f"answered {response.status_code}, which is not a gateway's answer"
    message = printable(str(error.get("message")))
    if response.status_code == 401:
        message += (
            " Name its variable with --admin-key-env. (A key that the gateway made at its start is "
            "found only by its own user on its own machine.)"
        )
    return message


def printable(text: str) -> str:
    """Text without control characters: names come from instances, and a terminal obeys them."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
