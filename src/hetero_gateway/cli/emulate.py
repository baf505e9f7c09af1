"""``hetero-gateway emulate``: an emulated vLLM server, timed by p1..p9 of a profile."""

import argparse
import sys

from hetero_gateway.cli import standard_streams
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.lab.emulator.app import EmulatedVLLM
from hetero_gateway.lab.emulator.event_settings import read_config as read_events
from hetero_gateway.lab.emulator.ranks import EmulatedRanks
from hetero_gateway.lab.emulator.server import EmulatedServer, listen
from hetero_gateway.lab.emulator.settings import EmulatorSettings, LogNormalOutputs, TraceOutputs
from hetero_gateway.lab.emulator.transfer_settings import KVTransferSettings, read_config


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    standard_streams.tolerate_output()
    settings = settings_of(args)
    emulated = (
        EmulatedVLLM(settings)
        if args.data_parallel_size == 1
        else EmulatedRanks(settings, args.data_parallel_size)
    )
    listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    ready = (
        f"emulated vLLM: {settings.profile.name} as {', '.join(settings.model_names)}, "
        f"{settings.time_scale:g} times real speed, on http://{where}:{port}"
    )
    server = EmulatedServer(
        emulated,
        listener,
        shutdown_timeout_s=args.shutdown_timeout,
        on_ready=lambda: print(ready, file=sys.stderr, flush=True),
    )
    server.serve_until_signal()
    return 0


def settings_of(args: argparse.Namespace) -> EmulatorSettings:
    """The settings that the command's arguments ask for."""
    return EmulatorSettings(
        profile=load_profile(args.profile),
        models=tuple(args.model or ()),
        time_scale=args.time_scale,
        max_model_len=args.max_model_len,
        scheduling=args.scheduling,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_gpu_blocks=args.num_gpu_blocks_override,
        max_num_queued_reqs=args.max_num_queued_reqs,
        api_key=args.api_key,
        lengths=_lengths(args),
        seed=args.seed,
        slowdown=args.slowdown,
        prefix_caching=args.enable_prefix_caching,
        prompt_tokens_details=args.enable_prompt_tokens_details,
        lora_modules=tuple(name.partition("=")[0] for name in args.lora_modules),
        store_responses=args.store_responses,
        kv_transfer=_kv_transfer(args),
        kv_events=None if args.kv_events_config is None else read_events(args.kv_events_config),
        dtype=args.dtype,
        attention_backend=args.attention_backend,
    )


def _kv_transfer(args: argparse.Namespace) -> KVTransferSettings | None:
    if args.kv_transfer_config is None:
        return None
    return KVTransferSettings(
        read_config(args.kv_transfer_config),
        args.kv_host or args.host,
        args.kv_port,
        args.kv_gbit_per_s,
        args.kv_start_s,
        args.kv_bytes_per_token,
    )


def _lengths(args: argparse.Namespace) -> LogNormalOutputs | TraceOutputs:
    if args.output_lengths is not None:
        return TraceOutputs.read(args.output_lengths)
    given = {"mean_tokens": args.mean_output_tokens, "cv": args.cv_output_tokens}
    return LogNormalOutputs(**{key: value for key, value in given.items() if value is not None})
