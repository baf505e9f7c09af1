"""README.md of a written directory: what was planned, where the figures are from, how to start."""

from collections.abc import Sequence

from hetero_gateway.deploy import template
from hetero_gateway.deploy.command import MASTER_PORT
from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions, on_one_host
from hetero_gateway.planner.plan import Plan


def readme_text(
    plan: Plan, instances: Sequence[DeployedInstance], options: DeploymentOptions
) -> str:
    """Plain sentences; every command can be copied."""
    emulate, figures = options.emulate, plan.best.simulated
    machines = list(dict.fromkeys(i.machine_name for i in instances))
    vendors = sorted({i.vendor.name for i in instances} - {"NVIDIA"})
    values = {
        "model": options.served_model_name,
        "serving": sum(not i.rank for i in instances),
        "kind": "emulated" if emulate else "vLLM",
        "emulate": emulate,
        "command": options.command,
        "simulated": figures is not None,
        "tokens_per_s": f"{figures.tokens_per_s:.0f}" if figures else "",
        "output_tokens_per_s": f"{figures.output_tokens_per_s:.0f}" if figures else "",
        "policy": plan.policy,
        "scaled": emulate and options.time_scale != 1,
        "time_scale": f"{options.time_scale:g}",
        "instances": "\n".join(map(_row, instances)),
        "one_host": on_one_host(instances, options),
        "gateway_port": options.gateway_port,
        "scripts": "\n".join(f"    ./commands/{name}.sh" for name in machines),
        "unnamed": not emulate and options.model is None,
        "named": not emulate and options.model is not None,
        "wanted_checkpoint": options.wanted_checkpoint,
        "checkpoint": options.model,
        "workload": len(options.workload),
        "admin_key": "" if emulate else "HETERO_GATEWAY_ADMIN_KEY=… ",
        "hf_token": "" if emulate else "HF_TOKEN=… ",
        "profiles": "\n".join(
            f"    HF_TOKEN=… docker compose --profile {name} up -d" for name in machines
        ),
        "splits": any(i.kv_group is not None for i in instances),
        "splits_vllm": not emulate and any(i.kv_group is not None for i in instances),
        "kubernetes": emulate or any(i.size.machines == 1 for i in instances),
        "stretched": not emulate and any(i.size.machines > 1 for i in instances),
        "hf_literal": "" if emulate else " \\\n      --from-literal=hf-token=…",
        "master_port": MASTER_PORT,
        "other_vendors": "" if emulate else ", ".join(vendors),
    }
    return template.text("readme.md", values)


def _row(i: DeployedInstance) -> str:
    """One row of the table of instances."""
    devices = ",".join(str(d) for d in i.devices)
    profile, memory = i.type.profile, i.type.memory
    return (
        f"| {i.machine.id} | {i.machine.count} × {i.machine.accelerator} | {i.id} "
        f"| {i.size} | {devices} | {'–' if i.rank else i.port} "
        f"| {profile.kv_capacity_tokens} ± {memory.uncertainty:.0%}"
        f"{' (tight)' if memory.tight else ''} "
        f"| {profile.source.get('how', 'derived')} ± {i.type.time_uncertainty:.0%} |"
    )
