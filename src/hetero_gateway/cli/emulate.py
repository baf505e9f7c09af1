"""``hetero-gateway emulate``: an emulated vLLM server, its time by p1..p9 of a profile."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_gateway.cli import standard_streams

if TYPE_CHECKING:
    from hetero_gateway.lab.emulator.lengths import OutputLengths
    from hetero_gateway.lab.emulator.settings import EmulatorSettings

_EXAMPLE = """\
example:
  hetero-gateway emulate --profile V100-32GB-NVLink2/Llama-3-8B/tp4 --port 8101 --time-scale 10
  curl -s localhost:8101/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "Once upon a time", "max_tokens": 20, "stream": true}'

Prompts are counted as 4 bytes per token (exactly when given as token ids). The same body gets the
same answer on every instance of one seed. Times are those of the profile, divided by the scale.
What was computed stays in the KV cache until the room is needed, as in vLLM, and a prompt that
begins like it is computed from there; POST /reset_prefix_cache forgets it.
POST /emulator/slowdown with {"factor": 2} makes every further step take twice as long.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "emulate",
        help="an emulated vLLM server: real HTTP, times from a profile",
        description="An emulated vLLM server: real HTTP and vLLM's wire behaviour, with continuous "
        "batching, a paged KV cache and preemption timed by a profile's p1..p9.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--profile", required=True, metavar="NAME_OR_FILE", help="built-in name, or a .yaml file")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add(
        "--model",
        action="append",
        metavar="NAME",
        help="name to serve under; repeat it for aliases (default: the profile's model)",
    )
    add("--time-scale", type=float, default=1.0, metavar="X", help="run X times faster than real")
    add("--slowdown", type=float, default=1.0, metavar="X", help="steps X times longer than fitted")
    add("--max-num-seqs", type=int, metavar="N", help="most sequences running at once")
    add("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in one step")
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="context window in tokens (default: 8192, or the KV capacity if less)",
    )
    add(
        "--num-gpu-blocks-override",
        type=int,
        metavar="N",
        help="KV blocks of 16 tokens, instead of the profile's capacity",
    )
    add(
        "--scheduling",
        choices=["chunked", "prefill-first"],
        default="chunked",
        help="vLLM V1's or V0's (default: %(default)s)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV blocks of what was computed (default: as vLLM, it does)",
    )
    add(
        "--enable-prompt-tokens-details",
        action="store_true",
        help="say in usage how many prompt tokens were cached",
    )
    add(
        "--store-responses",
        action="store_true",
        help="keep what /v1/responses answers, as vLLM does with VLLM_ENABLE_RESPONSES_API_STORE=1",
    )
    add(
        "--lora-modules",
        nargs="+",
        default=(),
        metavar="NAME",
        help="serve these names as adapters, which share no cached prefix (also NAME=PATH)",
    )
    add("--max-num-queued-reqs", type=int, metavar="N", help="answer 503 when N are waiting")
    add("--api-key", metavar="KEY", help="require it on /v1/*")
    add("--seed", type=int, default=0, help="of texts and drawn lengths (default: %(default)s)")
    add(
        "--output-lengths",
        type=Path,
        metavar="FILE.csv",
        help="draw unforced lengths from a trace's output_tokens",
    )
    add(
        "--mean-output-tokens", type=float, metavar="X", help="else log-normal: mean (default: 200)"
    )
    add("--cv-output-tokens", type=float, metavar="X", help="and sd over mean (default: 0.8)")
    add(
        "--shutdown-timeout",
        type=int,
        default=0,
        metavar="S",
        help="seconds that open streams may go on after a signal (default: 0)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from hetero_gateway.lab.emulator.app import EmulatedVLLM
    from hetero_gateway.lab.emulator.server import EmulatedServer, listen

    standard_streams.tolerate_output()
    settings = settings_of(args)
    emulated = EmulatedVLLM(settings)
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
    """What the command's words ask for."""
    from hetero_gateway.files.profile_file import load_profile
    from hetero_gateway.lab.emulator.settings import EmulatorSettings

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
    )


def _lengths(args: argparse.Namespace) -> OutputLengths:
    from hetero_gateway.lab.emulator.lengths import LogNormalOutputs, TraceOutputs

    if args.output_lengths is not None:
        return TraceOutputs.read(args.output_lengths)
    given = {
        "mean_tokens": args.mean_output_tokens,
        "cv": args.cv_output_tokens,
    }
    return LogNormalOutputs(**{key: value for key, value in given.items() if value is not None})
