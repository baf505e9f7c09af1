"""``plan -o DIR``: turns a plan and its flags into the files of a deployment."""

import argparse
import math
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from hetero_gateway.deploy.checkpoints import checkpoint_of
from hetero_gateway.deploy.command import ON_LOADING
from hetero_gateway.deploy.directory import check_directory, write_deployment
from hetero_gateway.deploy.instances import DeploymentOptions
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.model_cards import MODEL_CARDS, says_storage
from hetero_gateway.files.plan_request import PlanRequest
from hetero_gateway.planner.plan import Plan
from hetero_gateway.planner.question import sample_requests
from hetero_gateway.sim.figures import finite


def check_arguments(args: argparse.Namespace) -> None:
    """Find out before the search what would fail after it. Raises ConfigError."""
    if args.output is None:
        for name, default in (("emulate", False), ("force", False), ("time_scale", 1.0)):
            if getattr(args, name) != default:
                raise ConfigError(f"--{name.replace('_', '-')}: only with -o DIR")
        return
    if args.time_scale != 1 and not args.emulate:
        raise ConfigError("--time-scale: only with --emulate; real hardware has its own speed")
    check_directory(args.output, force=args.force)


def write(
    args: argparse.Namespace, plan: Plan, request: PlanRequest, document: Mapping[str, Any]
) -> None:
    """Write the best candidate and report it on standard error."""
    if args.output is None:
        return
    options = deployment_options(args, plan, request, document)
    paths = write_deployment(plan, options, args.output, force=args.force)
    print(f"wrote {len(paths)} files; begin with {args.output / 'README.md'}", file=sys.stderr)


def deployment_options(
    args: argparse.Namespace, plan: Plan, request: PlanRequest, document: Mapping[str, Any]
) -> DeploymentOptions:
    """What the files need besides the plan; engines as simulated."""
    goals, quantization = request.question.goals, request.model.quantization
    card = MODEL_CARDS.get(request.model.name)
    published = card is not None and card.quantization == quantization
    model: str | None = checkpoint_of(request.model.name)
    if request.model_directory is not None:
        model = str(request.model_directory)
    elif "/" in request.model_name:
        model = request.model_name
    elif quantization is not None and quantization.method not in ON_LOADING and not published:
        model = None  # the card describes the unquantised checkpoint
    return DeploymentOptions(
        model=model,
        served_model_name=request.served_name or request.model_name,
        engine=request.options,
        dtype=request.model.dtype,
        quantization=None if quantization is None else quantization.method,
        quantise_on_loading=not (
            published
            or request.stored_in_config
            or ("/" in request.model_name and says_storage(request.model_name))
        ),
        prefill_first=request.question.engines.scheduling == "prefill-first",
        addresses=request.addresses,
        accelerators=request.accelerators,
        first_port=args.first_port,
        gateway_port=args.gateway_port,
        emulate=args.emulate,
        time_scale=args.time_scale,
        ttft_p99_s=_limit(goals.ttft_p99_s, goals.slo and goals.slo.ttft_s),
        tpot_p99_s=_limit(goals.tpot_p99_s, goals.slo and goals.slo.tpot_s),
        slo={} if goals.slo is None else {k: finite(v) for k, v in goals.slo._asdict().items()},
        priors=(plan.mean_prompt_tokens, plan.mean_output_tokens),
        workload=sample_requests(plan, request.question),
        # The search time changes from run to run; the files must not.
        document={key: value for key, value in document.items() if key != "took_s"},
        command=_command(args),
    )


def _limit(p99_s: float | None, slo_s: float | None) -> float | None:
    """The latency limit for instances that follow the load: the goal, or each request's limit."""
    if p99_s is None and slo_s is not None and math.isfinite(slo_s):
        return slo_s
    return p99_s


def _command(args: argparse.Namespace) -> str:
    words = ["hetero-gateway", "plan", "-c", str(args.config), "-o", str(args.output)]
    if args.emulate:
        words += ["--emulate", "--time-scale", f"{args.time_scale:g}"]
    return shlex.join(words)
