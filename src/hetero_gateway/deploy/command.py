"""The command of one instance: ``vllm serve``, or ``hetero-gateway emulate`` in its place.

Every setting that the plan was simulated with is given explicitly, as vLLM's defaults differ
between versions and cards.
"""

import ipaddress
import json

from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.accelerator_catalogue import accelerator

# Methods that vLLM applies while loading an unquantised checkpoint. vLLM reads others from the
# checkpoint; naming them would keep it from choosing the kernel.
ON_LOADING = ("fp8", "bitsandbytes")
_WORDS = {"none": None, "auto": None}
# vLLM's own default port where the parts of an instance on several machines meet.
MASTER_PORT = 29501
# vLLM's own default port of the side channel, and how many ports one instance needs.
SIDE_CHANNEL_PORT, SIDE_CHANNEL_STEP = 5600, 16
KV_CONNECTOR = "NixlConnector"
# Storages that fix the dtype: vLLM refuses another (mxfp4 with float16).
_OWN_DTYPE = ("mxfp4",)


def serve_arguments(instance: DeployedInstance, options: DeploymentOptions) -> list[str]:
    """The arguments after ``vllm serve MODEL``, without ``--host`` and ``--port``."""
    engine = options.engine
    words = ["--served-model-name", options.served_model_name]
    words += parallel_arguments(instance)
    words += ["--gpu-memory-utilization", f"{engine.utilisation:g}"]
    if engine.max_model_len is not None:
        words += ["--max-model-len", str(engine.max_model_len)]
    words += ["--max-num-seqs", str(sequences(instance))]
    if engine.max_num_batched_tokens is not None:
        # Never fewer than sequences, which neither engine accepts.
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
    """Arguments of an instance that hands prompts over, in any role.

    The gateway decides roles by the requests that arrive, so none is fixed here.
    """
    config = {"kv_connector": KV_CONNECTOR, "kv_role": "kv_both"}
    return ["--kv-transfer-config", json.dumps(config)]


def side_channel(instance: DeployedInstance, options: DeploymentOptions) -> str:
    """Shell words before a command: the address where others ask for the instance's blocks.

    The address is bound, so it cannot be a name.
    """
    try:
        address = str(ipaddress.ip_address(instance.host.strip("[]")))
    except ValueError:
        address = '"${KV_HOST:?the address of this machine that the other ones reach}"'
    port = SIDE_CHANNEL_PORT + SIDE_CHANNEL_STEP * (instance.port - options.first_port)
    names = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
    return f"{names[0]}={address} {names[1]}={port} "


def parallel_arguments(instance: DeployedInstance) -> list[str]:
    """How the model is divided, and across which machines."""
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
    """Limit per scheduler: each data-parallel copy has one, while the profile counts all
    together."""
    return instance.type.profile.max_num_seqs // instance.size.data


def emulate_arguments(instance: DeployedInstance, options: DeploymentOptions) -> list[str]:
    """The arguments after ``hetero-gateway emulate --profile FILE``, without
    ``--host``/``--port``."""
    engine, profile = options.engine, instance.type.profile
    words = ["--model", options.served_model_name]
    words += ["--time-scale", f"{options.time_scale:g}"]
    if engine.max_model_len is not None:
        # Rounded down to whole blocks of the KV cache.
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
    """The value of ``--dtype``: float16 if the hardware has no bfloat16."""
    if options.quantization in _OWN_DTYPE:
        return None
    wanted = options.dtype if options.dtype not in _WORDS else None
    if wanted not in (None, "bfloat16"):
        return wanted
    try:
        has_bf16 = accelerator(instance.machine.accelerator, options.accelerators).bf16
    except ConfigError:  # the profile's hardware is not in the catalogue
        return wanted
    return wanted if has_bf16 else "float16"
