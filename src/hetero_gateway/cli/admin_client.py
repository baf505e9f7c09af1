"""What commands that ask a running gateway share: its /admin, and a table of columns."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hetero_gateway.errors import ConfigError, HeteroGatewayError

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """URL, --admin-key-env and --json."""
    parser.add_argument("url", metavar="URL", help="the gateway, as http://HOST:PORT")
    add_key_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_from_gateway(options: argparse._ActionsContainer, text: str) -> None:
    """--from-gateway, of a command that works on what a gateway has seen; ``text`` is its help."""
    options.add_argument("--from-gateway", metavar="URL", help=text)


def add_key_argument(options: argparse._ActionsContainer) -> None:
    """--admin-key-env."""
    options.add_argument(
        "--admin-key-env",
        metavar="NAME",
        help="environment variable with the gateway's admin key, where it wants one",
    )


def fetch(args: argparse.Namespace, path: str, params: dict[str, Any]) -> dict[str, Any]:
    """What GET ``path`` answers; ``args`` as ``add_arguments`` has them. See fetch_document."""
    return fetch_document(args.url, args.admin_key_env, path, params)


def fetch_document(
    url: str, admin_key_env: str | None, path: str, params: dict[str, Any]
) -> dict[str, Any]:
    """What GET ``path`` answers.

    Raises:
        ConfigError: the URL cannot be one, or the key's variable is not set.
        HeteroGatewayError: not reachable, refused, or not a gateway.
    """
    response = _get(url, admin_key_env, path, params)
    document = _document(response)
    if response.is_success and isinstance(document, dict):
        return document
    raise HeteroGatewayError(f"{url}: {_refusal(response, document)}")


def fetch_csv(url: str, admin_key_env: str | None, path: str) -> str:
    """The table that GET ``path`` answers. Raises as ``fetch_document`` does."""
    response = _get(url, admin_key_env, path, {})
    if response.is_success and response.headers.get("content-type", "").startswith("text/csv"):
        return response.text
    raise HeteroGatewayError(f"{url}: {_refusal(response, _document(response))}")


def _get(url: str, admin_key_env: str | None, path: str, params: dict[str, Any]) -> httpx.Response:
    # Imported here so that --help stays quick.
    from hetero_gateway.files.gateway_config import secret
    from hetero_gateway.plain_httpx import httpx

    if not _is_address(url):
        raise ConfigError("URL: must be http://HOST:PORT or https://HOST:PORT, and hold no key")
    key = secret(admin_key_env, "--admin-key-env")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        # trust_env: a proxy of the environment would get the key.
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            return client.get(url.rstrip("/") + path, params=params, headers=headers)
    except httpx.LocalProtocolError:
        raise ConfigError(f"--admin-key-env: {admin_key_env} is no valid key") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise HeteroGatewayError(f"{url}: the gateway does not answer: {error}") from error


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
        message += " Name its variable with --admin-key-env."
    return message


def print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns two spaces apart; a column of figures is set to the right."""
    lines = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [all(cell[:1].isdigit() or cell == "-" for cell in c) for c in zip(*rows, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())


def printable(text: str) -> str:
    """Text without control characters: names come from instances, and a terminal obeys them."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def figure(value: float | None, unit: str = "") -> str:
    """A number to read, or - where there is none."""
    if value is None:
        return "-"
    return (f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}") + unit


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
