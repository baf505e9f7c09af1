"""The command of one instance: ``vllm serve``, or ``hetero-gateway emulate`` in its place.

Every setting that the plan was simulated with is said, whatever vLLM's default is: defaults differ
between versions and cards.
"""

import ipaddress
import json

from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.accelerator_catalogue import accelerator

# Methods that vLLM applies while loading a wide checkpoint. Others are read from the checkpoint;
# naming them would take the choice of the kernel away from vLLM.
ON_LOADING = ("fp8", "bitsandbytes")
_WORDS = {"none": None, "auto": None}
# vLLM's own default, where the parts of an instance on several machines meet.
MASTER_PORT = 29501
# vLLM's own default of the side channel, and so many ports for one instance.
SIDE_CHANNEL_PORT, SIDE_CHANNEL_STEP = 5600, 16
KV_CONNECTOR = "NixlConnector"
# Storages that choose the dtype themselves: vLLM refuses another (mxfp4 with float16).
_OWN_DTYPE = ("mxfp4",)


def serve_arguments(instance: DeployedInstance, options: DeploymentOptions) -> list[str]:
    """What follows ``vllm serve MODEL``, but for ``--host`` and ``--port``."""
    engine = options.engine
    words = ["--served-model-name", options.served_model_name]
    words += parallel_arguments(instance)
    words += ["--gpu-memory-utilization", f"{engine.utilisation:g}"]
    if engine.max_model_len is not None:
        words += ["--max-model-len", str(engine.max_model_len)]
    words += ["--max-num-seqs", str(sequences(instance))]
    if engine.max_num_batched_tokens is not None:
        # Never fewer than sequences, as neither engine accepts that.
        most = max(engine.max_num_batched_tokens, sequences(instance))
        words += ["--max-num-batched-tokens", str(most)]
    if dtype := _dtype(instance, options):
        words += ["--dtype", dtype]
    if options.quantization in ON_LOADING and options.quantise_on_loading:
        words += ["--quantization", options.quantization]
    if engine.kv_dtype != "auto":
        words += ["--kv-cache-dtype", engine.kv_dtype]
    if engine.enforce_eager:
        words.append("--enforce-eager")
    return [*words, "--shutdown-timeout", str(options.shutdown_timeout_s)]


def transfer_arguments() -> list[str]:
    """What an instance is started with that hands prompts over, in any role.

    The gateway finds roles by what comes, so that none is fixed here.
    """
    config = {"kv_connector": KV_CONNECTOR, "kv_role": "kv_both"}
    return ["--kv-transfer-config", json.dumps(config)]


def side_channel(instance: DeployedInstance, options: DeploymentOptions) -> str:
    """Shell words in front of a command: where others ask for the instance's blocks.

    The address is bound, so that it cannot be a name.
    """
    try:
        address = str(ipaddress.ip_address(instance.host.strip("[]")))
    except ValueError:
        address = '"${KV_HOST:?the address of this machine that the other ones reach}"'
    port = SIDE_CHANNEL_PORT + SIDE_CHANNEL_STEP * (instance.port - options.first_port)
    names = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
    return f"{names[0]}={address} {names[1]}={port} "


def parallel_arguments(instance: DeployedInstance) -> list[str]:
    """How the model is shared out, and over which machines."""
    size = instance.size
    words = ["--tensor-parallel-size", str(size.tensor)]
    if size.pipeline > 1:
        words += ["--pipeline-parallel-size", str(size.pipeline)]
    if size.data > 1:
        words += ["--data-parallel-size", str(size.data)]
    if size.experts:
        words.append("--enable-expert-parallel")
    if size.machines > 1:
        words += ["--distributed-executor-backend", "mp", "--nnodes", str(size.machines)]
        words += ["--node-rank", str(instance.rank), "--master-addr", instance.master]
        words += ["--master-port", str(MASTER_PORT)]
    if instance.rank:
        words.append("--headless")
    return words


def sequences(instance: DeployedInstance) -> int:
    """Most of one scheduler: each data-parallel copy has one, the profile is of all together."""
    return instance.type.profile.max_num_seqs // instance.size.data


def emulate_arguments(instance: DeployedInstance, options: DeploymentOptions) -> list[str]:
    """What follows ``hetero-gateway emulate --profile FILE``, but for ``--host`` and ``--port``."""
    engine, profile = options.engine, instance.type.profile
    words = ["--model", options.served_model_name]
    words += ["--time-scale", f"{options.time_scale:g}"]
    if engine.max_model_len is not None:
        # Cut to whole blocks of what the KV cache holds.
        held = profile.kv_capacity_tokens // 16 * 16
        words += ["--max-model-len", str(min(engine.max_model_len, held))]
    words += ["--max-num-seqs", str(profile.max_num_seqs)]
    if engine.max_num_batched_tokens is not None:
        most = max(engine.max_num_batched_tokens, profile.max_num_seqs)
        words += ["--max-num-batched-tokens", str(most)]
    if options.prefill_first:
        words += ["--scheduling", "prefill-first"]
    return [*words, "--shutdown-timeout", str(options.shutdown_timeout_s)]


def _dtype(instance: DeployedInstance, options: DeploymentOptions) -> str | None:
    """What ``--dtype`` must say: float16 where the hardware has no bfloat16."""
    if options.quantization in _OWN_DTYPE:
        return None
    wanted = options.dtype if options.dtype not in _WORDS else None
    if wanted not in (None, "bfloat16"):
        return wanted
    try:
        has_bf16 = accelerator(instance.machine.accelerator, options.accelerators).bf16
    except ConfigError:  # a profile of hardware that the catalogue does not have
        return wanted
    return wanted if has_bf16 else "float16"
