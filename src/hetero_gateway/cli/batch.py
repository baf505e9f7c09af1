"""``batch``: let a gateway answer a file of requests, and write the answers to another file."""

import argparse
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hetero_gateway.errors import ConfigError, HeteroGatewayError
from hetero_gateway.files.batch_lines import LineProblem, read_line, window_s
from hetero_gateway.files.secrets import secret
from hetero_gateway.files.whole_file import named, read_json, write_document
from hetero_gateway.lab.load.admin import bearer
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.unreachable import why_unreachable
from hetero_gateway.plain_httpx import httpx

_OVER = ("completed", "failed", "expired", "cancelled")
_LOOK_S, _AGAIN_S, _TIMEOUT_S = 1.0, 5.0, 600.0
# How long to wait for a gateway that restarts.
_AWAY_S = 300.0
_MOST_SAID = 20


def run(args: argparse.Namespace) -> int:
    """0 when every request was answered, else 1."""
    out: Path = args.output or args.file.with_suffix(".out.jsonl")
    if out.exists() and not _state(out).exists():
        raise ConfigError(f"{out}: it exists already; name a new file")
    if window_s(args.window) is None:
        raise ConfigError("--window: must be a duration up to a year, as 24h or 90min")
    target = parse_target(args.url, secret(args.api_key_env, "--api-key-env"))
    headers = {} if target.api_key is None else bearer(target.api_key)
    with httpx.Client(
        base_url=target.base_url, headers=headers, timeout=_TIMEOUT_S, trust_env=False
    ) as client:
        gateway = _Gateway(client, target.base_url)
        if args.cancel:
            return _cancel(gateway, out)
        batch_id = _begin(gateway, args, out)
        try:
            batch = _wait(gateway, batch_id)
        except KeyboardInterrupt:
            print(f"\n{batch_id} goes on; the same command shows it again", file=sys.stderr)
            raise
        return _end(gateway, batch, out)


class _Gateway:
    """The batch API of the gateway. Raises HeteroGatewayError with the gateway's own message."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client = client
        self._url = url

    def ask(self, method: str, path: str, **more: Any) -> Any:
        """Reads are retried while the gateway is away."""
        until_s = time.monotonic() + _AWAY_S
        while True:
            try:
                response = self._client.request(method, f"/v1{path}", **more)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = why_unreachable(self._url, error)
                said = f"{self._url}: the gateway does not answer: {reason}"
                if method != "GET" or time.monotonic() > until_s:
                    raise HeteroGatewayError(said) from error
            else:
                if response.status_code != 503 or method != "GET" or time.monotonic() > until_s:
                    return self._checked(response).json()
            time.sleep(_AGAIN_S)

    def download(self, file_id: str, to: BinaryIO) -> None:
        path = f"/v1/files/{file_id}/content"
        try:
            with self._client.stream("GET", path) as response:
                if response.is_error:
                    response.read()
                for chunk in self._checked(response).iter_bytes():
                    to.write(chunk)
        except httpx.HTTPError as error:
            raise HeteroGatewayError(f"{self._url}: {path} broke off: {error}") from error

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        try:
            said = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            said = response.reason_phrase
        if response.status_code == 404 and "nothing at" in said:
            said = "it has no batches: set batches in its configuration"
        raise HeteroGatewayError(f"{self._url}: {response.status_code}: {said}")


def _state(out: Path) -> Path:
    return out.with_name(out.name + ".batch")


def _begun(out: Path) -> dict[str, Any] | None:
    path = _state(out)
    if not path.exists():
        return None
    document = read_json(path)
    if not {"batch", "digest"} <= set(document):
        raise ConfigError(f"{path}: names no batch; remove it to start over")
    return document


def _cancel(gateway: _Gateway, out: Path) -> int:
    begun = _begun(out)
    if begun is None:
        raise ConfigError(f"{_state(out)}: there is no batch to cancel")
    gateway.ask("POST", f"/batches/{begun['batch']}/cancel")
    print(f"{begun['batch']} is cancelled; the command without --cancel writes what it has")
    return 0


def _begin(gateway: _Gateway, args: argparse.Namespace, out: Path) -> str:
    """Upload the file and start the batch; or find the one started earlier."""
    digest, endpoint = _look_at(args.file)
    begun = _begun(out)
    if begun is not None:
        if begun["digest"] != digest:
            raise ConfigError(
                f"{_state(out)}: that batch was started from another file than {args.file}"
            )
        print(f"going on with {begun['batch']}", file=sys.stderr)
        return str(begun["batch"])
    with named(args.file, "read"), args.file.open("rb") as file:
        upload = gateway.ask(
            "POST", "/files", data={"purpose": "batch"}, files={"file": (args.file.name, file)}
        )
    asked = {"input_file_id": upload["id"], "completion_window": args.window}
    if endpoint is not None:
        asked["endpoint"] = endpoint
    batch_id = str(gateway.ask("POST", "/batches", json=asked)["id"])
    write_document(_state(out), json.dumps({"batch": batch_id, "digest": digest}))
    return batch_id


def _look_at(path: Path) -> tuple[str, str | None]:
    """A digest of the file, and the path that all its lines have; None: they have several.

    Raises ConfigError: lines that are not requests, by number.
    """
    digest, urls, problems = hashlib.sha256(), set[str](), list[str]()
    with named(path, "read"), path.open("rb") as file:
        for number, text in enumerate(file, 1):
            digest.update(text)
            if not text.strip():
                continue
            line = read_line(text.strip().removeprefix(b"\xef\xbb\xbf"), None)
            if isinstance(line, LineProblem):
                problems.append(f"{path}:{number}: {line.message}")
            else:
                urls.add(line.url)
    if len(problems) > _MOST_SAID:
        problems[_MOST_SAID:] = [f"{path}: and {len(problems) - _MOST_SAID} more"]
    if problems:
        raise ConfigError(*problems)
    if not urls:
        raise ConfigError(f"{path}: it has no lines")
    return digest.hexdigest(), urls.pop() if len(urls) == 1 else None


def _wait(gateway: _Gateway, batch_id: str) -> dict[str, Any]:
    """Show progress until the batch is over."""
    with _progress() as show:
        while True:
            batch: dict[str, Any] = gateway.ask("GET", f"/batches/{batch_id}")
            show(batch)
            if batch["status"] in _OVER:
                return batch
            time.sleep(_LOOK_S)


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A bar on a terminal; elsewhere a line for each tenth."""
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(
        TextColumn("{task.description:<12}"), *columns, console=console,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task, told = progress.add_task("validating", total=None, note=""), [-1]

        def show(batch: dict[str, Any]) -> None:
            counts = batch.get("request_counts") or {"total": 0, "completed": 0, "failed": 0}
            done, total = counts["completed"] + counts["failed"], counts["total"]
            note = _note(batch, counts["failed"])
            progress.update(
                task, description=batch["status"], completed=done, total=total or None, note=note
            )
            tenth = 10 * done // total if total else -1
            if progress.disable and tenth != told[0]:
                told[0] = tenth
                print(f"{batch['status']}: {done} of {total} requests{note}", file=sys.stderr)

        yield show


def _note(batch: dict[str, Any], failed: int) -> str:
    parts = [f"{failed} failed"] if failed else []
    if (end := batch.get("predicted_end_at")) is not None and batch["status"] == "in_progress":
        parts.append(f"{timedelta(seconds=max(0, end - round(time.time())))} left")
    if batch.get("late"):
        parts.append("will not be done in time")
    if batch.get("paused"):
        parts.append(f"paused: {batch['paused']}")
    return f", {', '.join(parts)}" if parts else ""


def _end(gateway: _Gateway, batch: dict[str, Any], out: Path) -> int:
    """Write the answers."""
    unwritten = out.with_name(out.name + ".part")
    files = [batch.get("output_file_id"), batch.get("error_file_id")]
    with named(out, "written"), unwritten.open("wb") as file:
        for file_id in filter(None, files):
            gateway.download(file_id, file)
        file.flush()
    unwritten.replace(out)
    _state(out).unlink(missing_ok=True)
    counts = batch.get("request_counts") or {"total": 0, "completed": 0, "failed": 0}
    for problem in ((batch.get("errors") or {}).get("data") or [])[:_MOST_SAID]:
        line = "" if problem.get("line") is None else f"line {problem['line']}: "
        print(f"hetero-gateway: batch: {line}{problem['message']}", file=sys.stderr)
    print(
        f"{batch['status']}: {counts['completed']} of {counts['total']} requests answered, "
        f"{counts['failed']} failed; {out}",
        file=sys.stderr,
    )
    return 0 if batch["status"] == "completed" and not counts["failed"] else 1
