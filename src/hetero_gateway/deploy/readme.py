"""README.md of a written directory: what was planned, how it is known, how to start it."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_gateway.deploy.command import MASTER_PORT
from hetero_gateway.deploy.gateway_files import ADMIN_KEY_ENV
from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions, on_one_host
from hetero_gateway.deploy.kubernetes import ADMIN_KEY_KEY, API_KEY_KEY, HF_TOKEN_KEY, SECRET
from hetero_gateway.planner.plan import Plan, PlanCandidate


def readme_text(
    plan: Plan,
    candidate: PlanCandidate,
    instances: Sequence[DeployedInstance],
    options: DeploymentOptions,
) -> str:
    """Plain sentences; every command can be copied."""
    one_host = on_one_host(instances, options)
    parts = [_head(plan, candidate, instances, options), _bare(instances, options, one_host)]
    if options.workload:
        parts.append(_load(options))
    parts.append(_compose(instances, options, one_host))
    if options.emulate or any(i.size.machines == 1 for i in instances):
        parts.append(_kubernetes(options))
    parts.append(_caveats(options, instances, one_host))
    return "\n".join(parts)


def _head(
    plan: Plan,
    candidate: PlanCandidate,
    instances: Sequence[DeployedInstance],
    options: DeploymentOptions,
) -> str:
    kind = "emulated instances" if options.emulate else "vLLM instances"
    serving = sum(not i.rank for i in instances)
    lines = [
        f"# {options.served_model_name}: {serving} {kind} behind one gateway",
        "",
    ]
    if options.command:
        lines += [f"Written by `{options.command}`.", ""]
    figures = candidate.simulated
    if figures is not None:
        lines.append(
            f"Planned throughput: {figures.tokens_per_s:.0f} tokens/s, prompt and output together, "
            f"{figures.output_tokens_per_s:.0f} of them output; simulated with everything sent at "
            f"once under the policy {plan.policy}."
        )
    if options.emulate and options.time_scale != 1:
        lines.append(
            f"The emulated instances run {options.time_scale:g} times faster than the hardware: "
            f"measured throughput is that many times the planned one."
        )
    lines += [
        "",
        "| machine | accelerators | instance | tensor parallel | devices | port | KV tokens "
        "| step times |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for i in instances:
        devices = ",".join(str(d) for d in i.devices)
        profile = i.type.profile
        how = profile.source.get("how", "derived")
        tight = " (tight)" if i.type.memory.tight else ""
        lines.append(
            f"| {i.machine.id} | {i.machine.count} × {i.machine.accelerator} | {i.id} "
            f"| {i.size} | {devices} | {'–' if i.rank else i.port} "
            f"| {profile.kv_capacity_tokens} ± {i.type.memory.uncertainty:.0%}{tight} "
            f"| {how} ± {i.type.time_uncertainty:.0%} |"
        )
    lines.append("")
    return "\n".join(lines)


def _bare(instances: Sequence[DeployedInstance], options: DeploymentOptions, one_host: bool) -> str:
    lines = ["## On bare machines", ""]
    if one_host:
        lines += [
            "This starts the instances, waits until they are healthy, and starts the gateway:",
            "",
            "    ./start.sh",
            "",
            f"The gateway then listens on http://127.0.0.1:{options.gateway_port}; Ctrl-C stops "
            "all of them. To start the instances alone:",
            "",
        ]
        lines += [f"    ./commands/{name}.sh" for name in _machine_names(instances)]
    else:
        lines += [
            "Copy this directory to every machine and start, on each, its script:",
            "",
            *(f"    ./commands/{name}.sh" for name in _machine_names(instances)),
            "",
            "Then start the gateway where clients reach it:",
            "",
            "    hetero-gateway validate -c gateway.yaml",
            "    hetero-gateway serve -c gateway.yaml --host 0.0.0.0",
        ]
    if not options.emulate and options.model is None:
        lines += [
            "",
            f"`MODEL=… ./commands/….sh`: {options.wanted_checkpoint}; the plan does not know one. "
            "In `kubernetes/instances.yaml` it takes the place of `replace-me/model`. Logs and pid "
            "files are in `run/`.",
        ]
    elif not options.emulate:
        lines += [
            "",
            f"`MODEL=/path ./commands/….sh` serves `/path` in place of `{options.model}`. "
            "Logs and pid files are in `run/`.",
        ]
    return "\n".join([*lines, ""])


def _load(options: DeploymentOptions) -> str:
    lines = [
        "## Under load",
        "",
        f"`requests.csv` has {len(options.workload)} requests of the lengths that were planned "
        "for. All of them at once:",
        "",
        f"    hetero-gateway bench http://127.0.0.1:{options.gateway_port} "
        "--requests requests.csv --rate inf --prompt token-ids",
        "",
        "The planned throughput is that of a run in its stride; the filling at the start of a run "
        "and the emptying at its end make the measured one lower.",
    ]
    return "\n".join([*lines, ""])


def _compose(
    instances: Sequence[DeployedInstance], options: DeploymentOptions, one_host: bool
) -> str:
    lines = [
        "## With Docker Compose",
        "",
        "The gateway's image is built from the project's source, once on every host that needs it "
        "(without the source, `docker compose build` does it in a folder that `init` wrote):",
        "",
        "    docker build -f docker/Dockerfile -t hetero-gateway:local .",
        "",
    ]
    admin_key = "" if options.emulate else f"{ADMIN_KEY_ENV}=… "
    if one_host:
        lines += [
            "Then the gateway (8000; /admin and the dashboard on 9001), the instances, Prometheus "
            "(9090) and Grafana (3000) are started by:",
            "",
        ]
        secrets = "" if options.emulate else f"HF_TOKEN=… {admin_key}"
        lines += [f"    {secrets}docker compose up -d"]
    else:
        lines += [
            "Compose starts containers of one host. The file is the same on every host; each "
            "starts its own part:",
            "",
            *(
                f"    HF_TOKEN=… docker compose --profile {name} up -d"
                for name in _machine_names(instances)
            ),
            f"    {admin_key}docker compose --profile gateway up -d",
        ]
    return "\n".join([*lines, ""])


def _kubernetes(options: DeploymentOptions) -> str:
    literals = [API_KEY_KEY, ADMIN_KEY_KEY] + ([] if options.emulate else [HF_TOKEN_KEY])
    words = " \\\n      ".join(f"--from-literal={key}=…" for key in literals)
    lines = [
        "## With Kubernetes",
        "",
        f"    kubectl create secret generic {SECRET} \\\n      {words}",
        "    kubectl apply -f kubernetes/",
        "",
        "The image `hetero-gateway:local` has to be on the nodes, or in a registry under a name "
        "that you put into the files. Instances are StatefulSets with headless Services, so that "
        "each replica has an address of its own: the gateway chooses among them, not kube-proxy.",
    ]
    lines += [
        "",
        "So that the numbers of replicas follow the load, apply `kubernetes/following/` in its "
        "place, and of the folders in it `keda/` (with KEDA), or `hpa/` (with "
        "prometheus-adapter).",
    ]
    if not options.emulate:
        lines.append("")
        lines.append(
            "`kubernetes.io/hostname` in `kubernetes/instances.yaml` has the plan's names of the "
            "machines; change it where the nodes have others."
        )
    return "\n".join([*lines, ""])


def _caveats(
    options: DeploymentOptions, instances: Sequence[DeployedInstance], one_host: bool
) -> str:
    lines = ["## Before it serves others", ""]
    lines.append(
        "- The gateway has no key in `gateway.yaml` and listens on loopback. Before it listens "
        "elsewhere, set `server.api_key_env`."
    )
    if not one_host:
        lines.append(
            "- The instances listen on all addresses of their machines, and vLLM's `--api-key` "
            "guards only `/v1/*`. Only the gateway may reach their ports: use a firewall or a "
            "private network. The machines' names must resolve on the gateway's host."
        )
    if not options.emulate and any(i.size.machines > 1 for i in instances):
        lines.append(
            "- Instances that stretch over several machines are started by `commands/` alone: "
            "start the scripts of all of their machines; the parts meet at the first one's port "
            f"{MASTER_PORT}, and need a network of their own. `compose.yaml` and `kubernetes/` "
            "do not have them. Where a machine has several networks, `NCCL_SOCKET_IFNAME` and "
            "`GLOO_SOCKET_IFNAME` choose."
        )
    if not options.emulate:
        lines.append(
            "- Commands are those of vLLM 0.32. Older versions have no `--shutdown-timeout`; "
            "without it, open requests break off when an instance is stopped."
        )
        others = sorted({i.vendor.name for i in instances} - {"NVIDIA"})
        if others:
            lines.append(
                f"- What is special to {', '.join(others)} (devices, images, resources) follows "
                "the vendors' documents and was not run for this project."
            )
    if options.emulate:
        lines.append(
            "- Where this machine is too slow for the emulated instances, their clocks give way: "
            "`hetero_gateway_emulator_lost_seconds_total` of their `/metrics` says by how much."
        )
    lines.append(
        "- Profiles that are `roofline` or `derived` are estimates: `hetero-gateway profile URL` "
        "measures an instance, and `hetero-gateway plan --from-gateway URL` plans again."
    )
    return "\n".join([*lines, ""])


def _machine_names(instances: Sequence[DeployedInstance]) -> list[str]:
    return list(dict.fromkeys(i.machine_name for i in instances))
