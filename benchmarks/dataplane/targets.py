"""The servers that are measured: how each is had, how it is started before two instances.

Everything is told to be quiet per request where it has such an option, to keep its connections to
the instances, to pass chunks on at once, and to take turns between the two. A server that cannot
be had is `Unavailable` with the reason; the tables then carry that reason.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from benchmarks.dataplane.rig import HERE, BenchError, Rig, cache_dir, note
from benchmarks.ports import free_port

REPOSITORY = HERE.parents[1]
# Pinned, so that figures from different days are about the same code.
VLLM_ROUTER = "vllm-router==0.1.17"
SGLANG_ROUTER = "sglang-router==0.3.2"
LITELLM = "litellm[proxy]<1.110"
PRODUCTION_STACK = (
    "not on PyPI: the vLLM production-stack router calls its package vllm-router too, and under "
    "that name PyPI has the Rust router; to measure a checkout of it use --extra"
)
START_TIMEOUT_S = 120.0


class Unavailable(BenchError):
    """A server that cannot be measured here; the message is the reason to print."""


@dataclass(frozen=True)
class Launch:
    """What to start."""

    command: list[str]
    version: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a server goes: its port, what it stands before, where its files are put."""

    name: str
    port: int
    instance_urls: list[str]
    workdir: Path
    install: bool

    def write(self, template: str, suffix: str) -> Path:
        """Fills in a template of this directory; ``$first`` and ``$second`` are HOST:PORT."""
        hosts = [url.removeprefix("http://") for url in self.instance_urls]
        text = Template((HERE / template).read_text()).substitute(
            port=self.port,
            free_port=free_port(),
            first=hosts[0],
            second=hosts[1],
            workdir=self.workdir,
        )
        path = self.workdir / f"{self.name}{suffix}"
        path.write_text(text)
        return path


def _installed(requirement: str, install: bool) -> tuple[Path, str]:
    """The bin directory of the requirement's own virtual environment, and its version."""
    name = requirement.split("=")[0].split("[")[0].split("<")[0]
    home = cache_dir() / name
    marker = home / "installed.txt"
    if not (marker.exists() and marker.read_text().startswith(requirement)):
        if not install:
            raise Unavailable(f"{requirement} is not installed, and --skip-install was given")
        note(f"installing {requirement} into {home} …")
        _pip_install(home, requirement)
        marker.write_text(requirement)
    pattern = f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"
    version = next(home.glob(pattern)).name.removesuffix(".dist-info").rsplit("-", 1)[1]
    return home / "bin", version


def _pip_install(home: Path, requirement: str) -> None:
    commands = [[sys.executable, "-m", "venv", str(home)]]
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    commands.append([*pip, "--quiet", "--prefer-binary", requirement])
    for command in commands:
        done = subprocess.run(["nice", *command], capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = (lines or done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Unavailable(f"{requirement} cannot be installed: {reason[:300]}")


def _debian(name: str) -> str:
    # A service's own directory is often not on the PATH of a plain user.
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Unavailable(f"{name} is not installed (Debian package {name})")
    return found


def _version_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    text = (done.stdout + done.stderr).splitlines()[0]
    return next((word.split("/")[-1] for word in text.split() if word[-1:].isdigit()), text)


def _nginx(place: Place) -> Launch:
    program = _debian("nginx")
    config = place.write("nginx.conf.template", ".conf")
    command = [program, "-p", str(place.workdir), "-c", str(config)]
    return Launch(command, _version_of([program, "-v"]))


def _haproxy(place: Place) -> Launch:
    program = _debian("haproxy")
    config = place.write("haproxy.cfg.template", ".cfg")
    return Launch([program, "-db", "-f", str(config)], _version_of([program, "-v"]).split("-")[0])


def _rust_router(requirement: str, module: str, *options: str) -> Callable[[Place], Launch]:
    def launch(place: Place) -> Launch:
        binaries, version = _installed(requirement, place.install)
        command = [str(binaries / "python"), "-m", module, "--host", "127.0.0.1"]
        command += ["--port", str(place.port), "--prometheus-port", str(free_port())]
        command += ["--worker-urls", *place.instance_urls, "--log-level", *options]
        return Launch(command, version)

    return launch


def _litellm(place: Place) -> Launch:
    binaries, version = _installed(LITELLM, place.install)
    config = place.write("litellm.yaml.template", ".yaml")
    command = [str(binaries / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
    env = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        # Without a key it does not check one, which only makes it cheaper.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network when it starts
        "NO_PROXY": "127.0.0.1",
    }
    return Launch([*command, "--port", str(place.port), "--telemetry", "False"], version, env)


def _gateway(*options: str) -> Callable[[Place], Launch]:
    def launch(place: Place) -> Launch:
        config = place.write("gateway.yaml.template", ".yaml")
        command = [sys.executable, "-m", "hetero_gateway", "serve", "-c", str(config), *options]
        env = {"PYTHONPATH": str(REPOSITORY / "src")}
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
        )
        return Launch(command, done.stdout.strip() or "no git", env)

    return launch


def _production_stack(place: Place) -> Launch:
    raise Unavailable(PRODUCTION_STACK)


TARGETS: dict[str, Callable[[Place], Launch]] = {
    "gateway": _gateway(),  # its default policy
    "gateway-min-max": _gateway("--policy", "min-max"),
    "nginx": _nginx,
    "haproxy": _haproxy,
    "vllm-router": _rust_router(
        VLLM_ROUTER, "vllm_router.launch_router", "warning", "--policy", "round_robin"
    ),
    "vllm-router-cache-aware": _rust_router(  # its default policy
        VLLM_ROUTER, "vllm_router.launch_router", "warning", "--policy", "cache_aware"
    ),
    "sglang-router": _rust_router(
        SGLANG_ROUTER, "sglang_router.launch_router", "warn", "--policy", "round_robin"
    ),
    "litellm": _litellm,
    "production-stack": _production_stack,
}


def extra(command: str) -> Callable[[Place], Launch]:
    """Any other server: a command line with {port}, {first} and {second} (the instances' URLs)."""

    def launch(place: Place) -> Launch:
        first, second = place.instance_urls
        words = shlex.split(command.format(port=place.port, first=first, second=second))
        if shutil.which(words[0]) is None:
            raise Unavailable(f"{words[0]} is not there")
        return Launch(words, "given")

    return launch


@dataclass
class Server:
    """A target that is up."""

    name: str
    version: str
    port: int
    pid: int | None  # None: no server at all, the load goes to an instance


def direct(rig: Rig) -> Server:
    """No proxy: the first mock instance itself."""
    return Server("direct", "no proxy", int(rig.instance_urls[0].rsplit(":", 1)[1]), None)


def start(rig: Rig, name: str, make: Callable[[Place], Launch], install: bool) -> Server:
    """Starts a server and waits until it answers. Raises Unavailable with the reason."""
    place = Place(name, free_port(), rig.instance_urls, rig.workdir, install)
    launch = make(place)
    process = rig.start(name, launch.command, rig.proxy_core, launch.env)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    last = "no answer"
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise Unavailable(f"ended with status {process.returncode}: {rig.log_tail(name)}")
        try:
            ask(place.port)
        except (OSError, ValueError) as error:
            last = str(error)
            time.sleep(0.3)
        else:
            return Server(name, launch.version, place.port, process.pid)
    rig.stop(process)
    raise Unavailable(f"not ready after {START_TIMEOUT_S:.0f} s ({last}): {rig.log_tail(name)}")


def ask(port: int) -> None:
    """One small request. Raises OSError or ValueError when the answer is not a right one."""
    body = {"model": "bench", "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer sk-bench"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        if "usage" not in json.load(answer):
            raise ValueError("an answer without usage")
