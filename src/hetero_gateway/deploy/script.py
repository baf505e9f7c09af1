"""Shell scripts for bare machines: no systemd, nothing but bash, coreutils and util-linux.

A script starts its programs, each in a session of its own with a log and a pid file, waits until
all answer /health, and stops all of them when it is asked to end. It asks for /health by bash's own
/dev/tcp, so no curl is needed.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_gateway.deploy import template
from hetero_gateway.deploy.command import (
    emulate_arguments,
    serve_arguments,
    side_channel,
    transfer_arguments,
)
from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions

# Grace after the programs' own timeouts, before they are killed.
_STOP_MARGIN_S = 15


@dataclass(frozen=True, slots=True)
class Program:
    """One process: ``command`` is shell text, with every word quoted as needed."""

    id: str
    port: int  # 0: it has no port, and counts as up while it runs
    command: str


def instance_program(
    instance: DeployedInstance, options: DeploymentOptions, listen: str
) -> Program:
    """The process of one instance."""
    address = ["--host", listen, "--port", str(instance.port)]
    if options.emulate:
        words = ["hetero-gateway", "emulate", "--profile", instance.profile_file]
        words += [*emulate_arguments(instance, options), *address]
        if (transfers := instance.transfers) is not None:
            words += [*transfer_arguments(), "--kv-gbit-per-s", f"{transfers.gbit_per_s:g}"]
            words += ["--kv-start-s", f"{transfers.link.start_s:g}"]
            words += ["--kv-bytes-per-token", f"{transfers.kv_bytes_per_token:.0f}"]
        command = shlex.join(words)
    else:
        words = serve_arguments(instance, options)
        words += [] if instance.rank else address
        devices = ",".join(str(device) for device in instance.devices)
        channel = ""
        if instance.transfers is not None:
            words += transfer_arguments()
            channel = side_channel(instance, options)
        variable = instance.vendor.visible_devices
        command = f'env {channel}{variable}={devices} vllm serve "$MODEL" {shlex.join(words)}'
    return Program(instance.id, 0 if instance.rank else instance.port, command)


def script_text(
    title: str, programs: Sequence[Program], options: DeploymentOptions, *, up: str
) -> str:
    """A bash script.

    Args:
        title: one line: what it starts.
        up: path from the script's directory to the one in which the commands run.
    """
    starts = "\n".join(f"start {shlex.quote(p.id)} {p.port} \\\n  {p.command}" for p in programs)
    needs = [] if options.emulate else ["vllm"]
    if any(program.command.startswith("hetero-gateway") for program in programs):
        needs.append("hetero-gateway")
    values = {
        "title": title,
        "up": shlex.quote(up),
        "model": "" if options.emulate else f"{_model_line(options)}\n",
        "needs": " and ".join(needs),
        "stop_s": options.shutdown_timeout_s + _STOP_MARGIN_S,
        "starts": starts,
    }
    return template.text("script.sh", values)


def _model_line(options: DeploymentOptions) -> str:
    if options.model is None:
        return f"MODEL=${{MODEL:?{options.wanted_checkpoint}}}"
    return f"MODEL=${{MODEL:-{shlex.quote(options.model)}}}"
