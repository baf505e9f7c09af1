"""A plan's instances by name: which devices, which port, which profile file.

Devices of a machine are assigned in the layout's order, largest instance first, so that a group
starts at a multiple of its size: neighbours share a link. Ids are DNS labels, as the files also use
them for containers and pods. Nothing here writes.
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

# Names that are safe in a header, a label and a command.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """What the files need besides the plan.

    Args:
        model: the argument of ``vllm serve``: a directory, or a name of the Hugging Face hub;
            None: unknown, the user must give it when starting.
        served_model_name: the name that clients ask for.
        engine: as planned and simulated.
        dtype, quantization: as for ``vllm serve``; None: not given.
        quantise_on_loading: the checkpoint is unquantised; else it is stored quantised, and
            says so.
        first_port: of the instances of one machine; each further instance takes the next.
        shutdown_timeout_s: how long open requests continue after SIGTERM.
        addresses: host name or address of a machine, by its id; default: its id, or loopback
            for a single machine.
        accelerators: the user's own, by name.
        emulate: emulated instances in place of vLLM, all on this machine.
        time_scale: of emulated instances: how many times faster than the hardware.
        priors: the gateway's initial expectations: mean prompt and output tokens; None: its
            defaults.
        ttft_p99_s, tpot_p99_s: the plan's latency goals; None: it has none.
        slo: limits per request, s, by ``scheduler.slo``'s keys; None: no such limit.
        prefill_first: emulated instances keep prefill and decode steps apart, as vLLM V0 did.
        workload: prompt and output tokens of requests for load tests, as planned.
        document: the plan as JSON, written next to the files.
        command: the command that made the directory, for its README.

    Raises:
        ConfigError: an impossible value.
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
        """The placeholder for the user to replace if ``model`` is None; letters, digits, spaces
        only."""
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
        profile_file: relative to the directory; ``gateway_profile_file`` is the same in the
            gateway's clock time, which differs for an emulated instance at another speed.
        rank: position of this part's machine among those that the instance spans; the first
            answers, the others listen to nobody. master: the first one's host.
        kv_group: it hands prompts over within this group, via ``transfers``; None: it does not.
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
        """The name shared by all instances of one size on one machine."""
        return f"{self.machine_name}-tp{self.size}"


def deployed_instances(plan: Plan, options: DeploymentOptions) -> tuple[DeployedInstance, ...]:
    """Every instance of the best candidate, in the order of the plan's machines.

    One that spans machines has an entry on each, unless it is emulated.

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
    stretched, master = 0, ""  # parts already placed, and the first part's host
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
    """In the same order, but machines that share instances are adjacent."""
    shared: dict[tuple[str, int, str], list[Machine]] = {}
    for machine in machines:
        layout = layouts[machine.id]
        alone = not any(as_size(size).machines > 1 for size in layout)
        key = (machine.accelerator, machine.count, machine.id if alone else f"{layout}")
        shared.setdefault(key, []).append(machine)
    return [machine for of in shared.values() for machine in of]


def profile_name(instance_type: InstanceType) -> str:
    """A file name for an instance type, distinct for distinct types of one plan."""
    text = f"{instance_type.accelerator}-{instance_type.profile.model}"
    folded = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    return f"{folded}-tp{instance_type.size}"


def on_one_host(instances: Sequence[DeployedInstance], options: DeploymentOptions) -> bool:
    """Whether everything, including the gateway, runs on one machine."""
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
    """Two machines at one address would use the same ports and the same devices."""
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
