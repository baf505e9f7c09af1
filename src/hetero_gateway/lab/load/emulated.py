"""Emulated instances and a gateway in front of them, each in a process of its own.

The instances run ``time_scale`` times faster than their profiles say, and the gateway gets the
profiles on the same time scale. Its own constants in seconds (timeouts, and those of
``finish-time``) are unchanged: at a scale of 6 a patience of 1 s is 6 s of the hardware.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import yaml

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.engines.vllm import paths
from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.admin_key import find
from hetero_gateway.files.profile_file import load_profile, profile_document, write_profile_file
from hetero_gateway.lab.load.admin import bearer
from hetero_gateway.lab.load.children import START_TIMEOUT_S, Child, Children
from hetero_gateway.plain_httpx import httpx

_POLL_S = 0.05
_PROBE_TIMEOUT_S = 60.0
_LOST = "hetero_gateway_emulator_lost_seconds"


@dataclass(frozen=True, slots=True)
class EmulatedInstance:
    """``profile``: built-in name or file of the emulated one; ``believed``: the gateway's profile
    of it, if that is different."""

    instance_id: str
    profile: str
    believed: Profile | None = None


@dataclass
class EmulatedCluster:
    """Starts the processes; the owner of ``children`` ends them.

    Args:
        model: the name that all instances serve.
        time_scale: virtual seconds per wall second.
        port: the gateway's; 0: a free one for each that is started.
        folder: for configuration files.
        instance_options: further options of ``emulate``, the same for all.
        gateway_config: the gateway's configuration besides its instances.
        described: the gateway is given profiles and the model's name; else only addresses.
        prefix_caching: of the instances. Without it, repeated requests, sent to compare
            servers, find nothing cached.
    """

    members: Sequence[EmulatedInstance]
    model: str
    time_scale: float
    port: int
    folder: Path
    children: Children
    _: KW_ONLY
    instance_options: Sequence[str] = ()
    gateway_config: Mapping[str, Any] | None = None
    described: bool = True
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        self.url = ""  # of the gateway that was started last
        self.instance_urls: dict[str, str] = {}
        self._emulators: list[Child] = []
        self._gateway: Child | None = None

    @property
    def emulator_pids(self) -> list[int]:
        return [child.process.pid for child in self._emulators]

    @property
    def gateway_pid(self) -> int:
        """Of the gateway that runs now; there must be one."""
        assert self._gateway is not None
        return self._gateway.process.pid

    async def start_instances(self) -> None:
        """Start the emulated instances, and write the gateway's configuration."""
        caching = "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"
        self._emulators = [
            self.children.start(
                instance.instance_id,
                *("emulate", "--profile", instance.profile, "--model", self.model),
                *("--port", "0", "--time-scale", f"{self.time_scale:g}"),
                *(caching, *self.instance_options),
            )
            for instance in self.members
        ]
        for child in self._emulators:
            self.instance_urls[child.name] = await child.url()
        self._write_config()

    async def start_gateway(self, policy: str, scheduler: Mapping[str, Any] | None = None) -> None:
        """A fresh gateway with this policy replaces the last one; it sees every instance up.

        ``scheduler``: of this one's configuration, replacing the common one.
        """
        if self._gateway is not None:
            self.children.stop(self._gateway)
        self._write_config(scheduler)
        self._gateway = self.children.start(
            "the gateway",
            *("serve", "-c", str(self.folder / "gateway.yaml"), "--host", "127.0.0.1"),
            *("--port", str(self.port), "--policy", policy, "--log-level", "warning"),
        )
        self.url = await self._gateway.url()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not all(i["up"] for i in await self.instances()):
                    self.children.check()
                    await asyncio.sleep(_POLL_S)
        except (TimeoutError, httpx.HTTPError) as error:
            self.children.check()
            raise HeteroGatewayError(
                f"the gateway does not see the instances: {error!r}"
            ) from error

    @property
    def admin_key(self) -> str:
        """Of the gateway that was started last. Raises HeteroGatewayError."""
        if (found := find(self.url)) is None:
            raise HeteroGatewayError(f"{self.url}: the gateway's admin key cannot be read")
        return found.key

    async def instances(self) -> list[dict[str, Any]]:
        """The gateway's current /admin/instances."""
        async with httpx.AsyncClient(headers=bearer(self.admin_key)) as client:
            answer = await client.get(f"{self.url}/admin/instances")
        listed: list[dict[str, Any]] = answer.raise_for_status().json()["instances"]
        return listed

    async def slow_down(self, instance_id: str, factor: float) -> None:
        """From its next step on, an emulated instance's steps take this many times longer."""
        async with httpx.AsyncClient() as client:
            url = f"{self.instance_urls[instance_id]}/emulator/slowdown"
            (await client.post(url, json={"factor": factor})).raise_for_status()

    async def lost_s(self) -> float:
        """Wall seconds that the emulated clocks lost on an overloaded machine, summed."""
        total_s = 0.0
        async with httpx.AsyncClient() as client:
            for url in self.instance_urls.values():
                text = (await client.get(url + paths.METRICS)).text
                for line in text.splitlines():
                    if line.startswith(_LOST):
                        total_s += float(line.rsplit(" ", 1)[1])
        return total_s

    def _write_config(self, scheduler: Mapping[str, Any] | None = None) -> None:
        """Write the gateway's configuration, with profiles on the emulators' clock."""
        instances = []
        for instance in self.members:
            url = self.instance_urls[instance.instance_id]
            entry = {"id": instance.instance_id, "base_url": url}
            if self.described:
                name = f"{instance.instance_id}.believed.yaml"
                profile = instance.believed or load_profile(instance.profile)
                write_profile(profile, self.folder / name, speed=self.time_scale)
                entry |= {"model": self.model, "profile": name}
            instances.append(entry)
        config = {
            # An emulated instance that is slow to answer is on a busy machine, and not down.
            "health": {"probe_timeout_s": _PROBE_TIMEOUT_S},
            **(self.gateway_config or {}),
            **({} if scheduler is None else {"scheduler": dict(scheduler)}),
            "server": {"shutdown_timeout_s": 1},
            "instances": instances,
        }
        (self.folder / "gateway.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def write_profile(profile: Profile, path: Path, *, speed: float = 1.0) -> None:
    """Write a profile file, of an instance that is this many times faster."""
    source = {"how": "derived", "note": f"{profile.name} at {speed:g}× speed"}
    document = profile_document(profile, source, speed=speed)
    write_profile_file(path, document)
