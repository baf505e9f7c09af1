"""A plan's instances by name: which devices, which port, which profile file.

Devices of one machine are given out in the layout's order, largest instance first, so that a group
begins at a multiple of its size: neighbours share a link. Ids are DNS labels, as the files use them
for containers and pods too. Nothing here writes.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_gateway.deploy.vendors import EMULATED, Vendor, vendor_of
from hetero_gateway.errors import ConfigError
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.layouts import machine_names
from hetero_gateway.planner.memory import EngineOptions
from hetero_gateway.planner.plan import InstanceType, Key, Layout, Machine, Plan
from hetero_gateway.planner.sizes import Size, as_size
from hetero_gateway.planner.splitting import Transfers

# What a name in a header, a label and a command may hold without surprise.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """What the files need to know beside the plan.

    Args:
        model: what ``vllm serve`` is given: a directory, or a name of the Hugging Face hub; None:
            nobody knows, the user must name it when starting.
        served_model_name: what clients ask for.
        engine: as planned and simulated.
        dtype, quantization: as of ``vllm serve``; None: not said.
        quantise_on_loading: the checkpoint is wide; else it is stored like that, and says so.
        first_port: of the instances of one machine; one more for each further instance.
        shutdown_timeout_s: how long open requests go on after SIGTERM.
        addresses: host name or address of a machine, by its id; default: its id, or loopback when
            there is one machine.
        accelerators: of the user's own, by name.
        emulate: emulated instances in place of vLLM, all on this machine.
        time_scale: of emulated instances: how many times faster than the hardware.
        priors: the gateway's expectations before it has seen requests: mean prompt and output
            tokens; None: its own.
        ttft_p99_s, tpot_p99_s: the plan's latency goals; None: it has none.
        slo: limits of each request, s, by ``scheduler.slo``'s keys; None: that one there is not.
        prefill_first: emulated instances keep prefill and decode steps apart, as vLLM V0 did.
        workload: prompt and output tokens of requests to load the instances with, as planned.
        document: the plan as JSON, written beside the files.
        command: how the directory was made, for its README.

    Raises:
        ConfigError: a value that cannot be.
    """

    model: str | None
    served_model_name: str
    engine: EngineOptions
    dtype: str | None = None
    quantization: str | None = None
    quantise_on_loading: bool = True
    first_port: int = 8001
    gateway_port: int = 8000
    shutdown_timeout_s: int = 20
    addresses: Mapping[str, str] = field(default_factory=dict)
    accelerators: Mapping[str, Accelerator] = field(default_factory=dict)
    emulate: bool = False
    time_scale: float = 1.0
    priors: tuple[float, float] | None = None
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    slo: Mapping[str, float | None] = field(default_factory=dict)
    prefill_first: bool = False
    workload: Sequence[tuple[int, int]] = ()
    document: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        if not _MODEL_NAME.fullmatch(self.served_model_name):
            raise ConfigError(
                f"model: {self.served_model_name!r} cannot be the name clients use; use "
                "letters, digits and . _ : / @ + -"
            )
        model = self.model
        if model is not None and (not model or not model.isprintable() or model.startswith("-")):
            raise ConfigError(f"model: {model!r} is neither a model's name nor its directory")
        for machine, address in self.addresses.items():
            if not _HOST.fullmatch(address):
                raise ConfigError(f"machines: {machine}: {address!r} is not a host name or address")
        if not 0 < self.time_scale < float("inf"):
            raise ConfigError("--time-scale: must be above 0")

    @property
    def wanted_checkpoint(self) -> str:
        """What the user is to name where ``model`` is None; letters, digits and spaces only."""
        stored = re.sub(r"[^A-Za-z0-9]+", " ", self.quantization or "this").strip()
        return f"name a checkpoint of the model that is stored as {stored}"


@dataclass(frozen=True, slots=True)
class DeployedInstance:
    """One instance of the plan, ready to be started.

    Args:
        id: unique in the plan; ``NAME-tpT-K``, which is also its pod's name.
        machine: of the plan; ``machine_name`` is its name in files.
        replica: K, among the instances of its size on its machine.
        host, port: where the gateway reaches it outside of containers.
        profile_file: relative to the directory; ``gateway_profile_file`` is the same in the time
            that the gateway's clock shows, which differs for an emulated one at another speed.
        rank: of the machines that it stretches over, which one this part is on; the first of them
            answers, and the others listen to nobody. master: the first one's host.
        kv_group: it hands prompts over within this group, over ``transfers``; None: it does not.
    """

    id: str
    machine: Machine
    machine_name: str
    type: InstanceType
    replica: int
    devices: tuple[int, ...]
    host: str
    port: int
    vendor: Vendor
    profile_file: str
    gateway_profile_file: str
    rank: int = 0
    master: str = ""
    kv_group: str | None = None
    transfers: Transfers | None = None

    @property
    def size(self) -> Size:
        return as_size(self.type.size)

    @property
    def tensor_parallel(self) -> int:
        return self.size.tensor

    @property
    def set_name(self) -> str:
        """Of all instances of one size on one machine."""
        return f"{self.machine_name}-tp{self.size}"


def deployed_instances(plan: Plan, options: DeploymentOptions) -> tuple[DeployedInstance, ...]:
    """Every instance of the best candidate, in the order of the plan's machines.

    One that stretches over machines has an entry on each, but where it is emulated.

    Raises:
        ConfigError: more instances than ports, or a layout that does not fit its machine.
    """
    layouts, verdict = plan.best.layouts, plan.splitting
    groups: Mapping[Key, str] = {}
    transfers = None
    if verdict is not None and verdict.pays:
        groups, transfers = verdict.groups, verdict.transfers
    used = [machine for machine in plan.machines if layouts.get(machine.id)]
    names = machine_names([machine.id for machine in plan.machines])
    result: list[DeployedInstance] = []
    stretched, master = 0, ""  # parts that have their machines, host of the present one's first
    for machine in _neighbours(used, layouts):
        layout = layouts[machine.id]
        if sum(layout) > machine.count:
            raise ConfigError(
                f"{machine.id}: {sum(layout)} accelerators planned of {machine.count}"
            )
        replicas = Counter[int]()
        device = 0
        for position, size in enumerate(layout):
            parts = as_size(size).machines
            rank = stretched % parts
            stretched += parts > 1
            if options.emulate and rank:
                continue
            offset = len(result) if options.emulate else position
            name = names[machine.id]
            profile = profile_name(plan.types[machine.accelerator, size])
            scaled = options.emulate and options.time_scale != 1
            result.append(
                DeployedInstance(
                    id=f"{name}-tp{size}-{replicas[size]}",
                    machine=machine,
                    machine_name=name,
                    type=plan.types[machine.accelerator, size],
                    replica=replicas[size],
                    devices=tuple(range(device, device + size)),
                    host=_host(machine.id, name, options, alone=len(used) == 1),
                    port=options.first_port + offset,
                    vendor=EMULATED if options.emulate else vendor_of(machine.accelerator),
                    profile_file=f"profiles/{profile}.yaml",
                    gateway_profile_file=f"profiles/{profile}{'-scaled' if scaled else ''}.yaml",
                    rank=rank,
                    kv_group=groups.get((machine.accelerator, size)),
                    transfers=transfers if (machine.accelerator, size) in groups else None,
                )
            )
            if parts > 1:
                master = master if rank else result[-1].host
                result[-1] = dataclasses.replace(result[-1], master=master)
            replicas[size] += 1
            device += size
    _check_ports(result, options)
    if not options.emulate:
        _check_hosts(result)
    return tuple(result)


def _neighbours(machines: Sequence[Machine], layouts: Mapping[str, Layout]) -> list[Machine]:
    """In their order, but those that share instances one after another."""
    shared: dict[tuple[str, int, str], list[Machine]] = {}
    for machine in machines:
        layout = layouts[machine.id]
        alone = not any(as_size(size).machines > 1 for size in layout)
        key = (machine.accelerator, machine.count, machine.id if alone else f"{layout}")
        shared.setdefault(key, []).append(machine)
    return [machine for of in shared.values() for machine in of]


def profile_name(instance_type: InstanceType) -> str:
    """A file name for an instance type, different for different types of one plan."""
    text = f"{instance_type.accelerator}-{instance_type.profile.model}"
    folded = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    return f"{folded}-tp{instance_type.size}"


def on_one_host(instances: Sequence[DeployedInstance], options: DeploymentOptions) -> bool:
    """Whether everything, the gateway included, runs on one machine."""
    return options.emulate or all(i.host == _LOOPBACK for i in instances)


def _host(machine_id: str, name: str, options: DeploymentOptions, *, alone: bool) -> str:
    if options.emulate:
        return _LOOPBACK
    if machine_id in options.addresses:
        return options.addresses[machine_id]
    if alone:
        return _LOOPBACK
    return machine_id if _HOST.fullmatch(machine_id) else name


def _check_hosts(instances: Sequence[DeployedInstance]) -> None:
    """Two machines at one address would have the same ports, and the same devices."""
    machines: dict[str, str] = {}
    for instance in instances:
        other = machines.setdefault(instance.host, instance.machine.id)
        if other != instance.machine.id:
            raise ConfigError(
                f"machines: {other} and {instance.machine.id} have the same address {instance.host}"
            )


def _check_ports(instances: Sequence[DeployedInstance], options: DeploymentOptions) -> None:
    if not instances:
        raise ConfigError("the plan deploys no instance")
    last = max(instance.port for instance in instances)
    if options.first_port < 1 or last > 65535:
        raise ConfigError(f"--first-port: {options.first_port} leaves no room up to {last}")
    if options.first_port <= options.gateway_port <= last:
        raise ConfigError(
            f"--first-port: the instances' ports {options.first_port} to {last} include the "
            f"gateway's, {options.gateway_port}"
        )
