"""``doctor``: what is right and wrong with a setup, in one table.

For this machine: versions and descriptors. For a configuration file: whether it is valid, and
whether each of its instances answers, accepts its key, and has a certificate that is not about to
expire. For a running gateway: the same, and what it sees. Nothing is changed, and no request
reaches an engine.
"""

import argparse
import json
import os
import platform
import resource
import ssl
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from hetero_gateway import __version__, compiled
from hetero_gateway.cli.reports.report import print_table, shared_in_words
from hetero_gateway.engines.vllm import paths, read_models
from hetero_gateway.errors import ConfigError, HeteroGatewayError
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.files.secrets import secret
from hetero_gateway.files.setup_warnings import access_warnings
from hetero_gateway.lab.load.admin import bearer, fetch_document, printable
from hetero_gateway.lab.load.unreachable import why_unreachable
from hetero_gateway.plain_httpx import httpx

_TIMEOUT_S = 5.0
_FEW_DESCRIPTORS = 4096
_SOON_S = 14 * 86400.0
# With a larger difference between clocks, keys and certificates are refused for no visible reason.
_MOST_CLOCK_S = 30.0
OK, WARNING, BAD = "ok", "warning", "BAD"


class Finding(NamedTuple):
    """One row: what was checked, its state, and details."""

    what: str
    state: str
    detail: str


def run(args: argparse.Namespace) -> int:
    """1 if anything is bad."""
    found = list(_machine())
    if args.config is not None:
        found += _file(args.config)
    if args.url is not None:
        found += _gateway(args)
    if args.json:
        print(json.dumps({"findings": [each._asdict() for each in found]}))
    else:
        print_table(("WHAT", "STATE", "MORE"), [tuple(map(printable, each)) for each in found])
    return int(any(each.state == BAD for each in found))


def _machine() -> Iterator[Finding]:
    versions = f"hetero-gateway {__version__}, Python {platform.python_version()}"
    yield Finding("versions", OK, f"{versions}, scheduler {compiled.form()}, {ssl.OPENSSL_VERSION}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = 0 <= hard < _FEW_DESCRIPTORS
    more = ": two are needed for each client; raise it (ulimit -n, LimitNOFILE=)" if few else ""
    yield Finding("descriptors", WARNING if few else OK, f"{hard} at most{more}")


def _file(path: Path) -> Iterator[Finding]:
    try:
        config = load_gateway_config(path)
    except ConfigError as error:
        yield from (Finding("file", BAD, line) for line in error.lines)
        return
    yield Finding("file", OK, f"{path}: policy {config.scheduler.policy}")
    for warning in access_warnings(config.server, named=config.clients.wanted):
        yield Finding("keys", WARNING, str(warning))
    if config.scheduler.shared is not None:
        yield _store(config.scheduler, path.parent)
    for each in config.instances:
        yield from _instance(each, path.parent)


def _store(config: SchedulerConfig, base_dir: Path) -> Finding:
    """Whether the Redis of ``scheduler.shared`` answers this machine, within the time allowed."""
    import asyncio  # a doctor without a shared store needs neither

    from hetero_gateway.scaleout.sharing.node import RedisNode, StoreError, check

    async def ask() -> None:
        node = RedisNode(config, base_dir)
        try:
            for reply in await node.in_time(lambda connection: connection.ask([(b"PING",)])):
                check(reply)
        finally:
            node.drop()

    try:
        asyncio.run(ask())
    except (ConfigError, StoreError) as error:
        return Finding("shared", BAD, str(error))
    return Finding("shared", OK, f"{config.shared}: answers")


def _instance(config: InstanceConfig, base_dir: Path) -> Iterator[Finding]:
    what = f"instance {config.id}"
    key = secret(config.api_key_env, "api_key_env")
    verify: ssl.SSLContext | bool = True
    if config.ca_file is not None:
        verify = ssl.create_default_context(cafile=base_dir / config.ca_file)
        if config.certificate_file is not None and config.key_file is not None:
            verify.load_cert_chain(base_dir / config.certificate_file, base_dir / config.key_file)
    yield from _answers(what, config.base_url, key, verify)


def _answers(
    what: str, url: str, key: str | None, verify: ssl.SSLContext | bool
) -> Iterator[Finding]:
    """Whether it answers, lists models, and agrees on the time."""
    try:
        # Proxies of the environment are ignored, as the gateway ignores them.
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=verify) as client:
            with client.stream("GET", url + paths.MODELS, headers=bearer(key) if key else {}) as it:
                body = it.read()
                yield from _certificate(what, it)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield Finding(what, BAD, f"{url}: {why_unreachable(url, error)}")
        return
    if it.status_code in (401, 403):
        needs = "its key is wrong" if key else "it wants a key: name its variable"
        yield Finding(what, BAD, f"{url}: {paths.MODELS} answered {it.status_code}; {needs}")
    elif not it.is_success:
        yield Finding(what, BAD, f"{url}: {paths.MODELS} answered {it.status_code}")
    else:
        models = sorted(read_models(body) or ())
        state, listed = (OK, ", ".join(models)) if models else (BAD, "lists no model")
        yield Finding(what, state, f"{url}: {listed}")
    if (date := it.headers.get("date")) is not None:
        try:
            ahead_s = parsedate_to_datetime(date).timestamp() - time.time()
        except ValueError:
            return
        if abs(ahead_s) > _MOST_CLOCK_S:
            yield Finding(
                what, WARNING, f"its clock differs from this machine's by {ahead_s:.0f} s"
            )


def _certificate(what: str, response: httpx.Response) -> Iterator[Finding]:
    stream = response.extensions.get("network_stream")
    tls = None if stream is None else stream.get_extra_info("ssl_object")
    found = None if tls is None else tls.getpeercert()
    if not found or "notAfter" not in found:
        return
    left_s = ssl.cert_time_to_seconds(found["notAfter"]) - time.time()
    soon = WARNING if left_s < _SOON_S else OK
    yield Finding(what, soon, f"its certificate is good for {left_s / 86400:.0f} days more")


def _gateway(args: argparse.Namespace) -> Iterator[Finding]:
    url = args.url.rstrip("/").removesuffix("/v1")
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError("URL: must be http://HOST:PORT or https://HOST:PORT")
    authorities = os.environ.get("SSL_CERT_FILE")
    verify = ssl.create_default_context() if authorities else True
    key = secret(args.api_key_env, "--api-key-env")
    before = list(_answers("gateway", url, key, verify))
    yield from before
    if any(each.state == BAD for each in before[:1]) and "answered" not in before[0].detail:
        return
    ask: Callable[[str], dict[str, object]] = lambda path: fetch_document(  # noqa: E731
        url, args.admin_key_env, path, {}
    )
    try:
        document = ask("/admin/instances")
    except HeteroGatewayError as error:
        yield Finding("admin", BAD, str(error))
        return
    instances = document["instances"]
    assert isinstance(instances, list)
    up = sum(bool(each["up"]) for each in instances)
    state = OK if up == len(instances) and up else WARNING if up else BAD
    yield Finding("admin", state, f"{up} of {len(instances)} instances take requests")
    for each in instances:
        if not each["up"]:
            yield Finding(f"instance {each['id']}", BAD, f"the gateway: {each['down_reason']}")
        elif each.get("scrape_problem"):
            yield Finding(f"instance {each['id']}", WARNING, str(each["scrape_problem"]))
    if isinstance(sharing := document.get("sharing"), dict):
        state = OK if sharing["mode"] == "shared" and sharing["other_replicas"] else WARNING
        yield Finding("sharing", state, shared_in_words(sharing))
    warnings = document["warnings"]
    assert isinstance(warnings, list)
    yield from (Finding("set-up", WARNING, str(text)) for text in warnings)
