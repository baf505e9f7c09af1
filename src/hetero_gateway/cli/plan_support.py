"""``plan support MODEL``: what is known about a model, and where it fits."""

import argparse
import dataclasses
import json
from pathlib import Path

from hetero_gateway.cli.reports import plan_support
from hetero_gateway.errors import ConfigError, named_place
from hetero_gateway.files.accelerator_catalogue import ACCELERATORS, accelerator
from hetero_gateway.files.model_file import bounds_of, model_config, read_model, stored_bytes
from hetero_gateway.files.plan_config import (
    EngineConfig,
    PlanConfig,
    engine_options,
    load_plan_config,
)
from hetero_gateway.files.plan_request import DEFAULT_CONTEXT
from hetero_gateway.files.whole_file import read_json
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.memory import EngineOptions
from hetero_gateway.planner.support import support


def run(args: argparse.Namespace) -> int:
    file = None if args.config is None else load_plan_config(args.config)
    devices = _accelerators(args, file)
    options = _options(args, file)
    asked = model_config(args.model, args.dtype, args.quantization)
    try:
        model, _ = read_model(asked, args.model, Path())
    except ConfigError as error:
        if asked.config is None:
            raise
        # Not modelled, or not a model at all: report what the file does say.
        path = asked.config / "config.json" if asked.config.is_dir() else asked.config
        config = read_json(path)
        if not config.get("model_type"):
            raise
        reason = str(error).removeprefix(f"{args.model}: model: ")
        bounds = bounds_of(
            config, path.absolute().parent.name, reason, stored_bytes(path.parent), devices,
            options.utilisation,
        )  # fmt: skip
        if args.json:
            print(json.dumps(plan_support.bounds_document(bounds), allow_nan=False))
        else:
            plan_support.print_bounds(bounds)
        return 0
    found = support(model, devices, _with_context(options, args, file, model.max_position))
    source = "built-in card" if asked.config is None else str(asked.config)
    if args.json:
        print(json.dumps(plan_support.document(found, devices, source), allow_nan=False))
    else:
        plan_support.print_support(found, devices, source)
    return 0


def _accelerators(args: argparse.Namespace, file: PlanConfig | None) -> list[Accelerator]:
    own = {} if file is None else file.own_accelerators(str(args.config))
    if not args.accelerator:
        return [*own.values(), *(a for name, a in ACCELERATORS.items() if name not in own)]
    with named_place("--accelerator"):
        return [accelerator(name, own) for name in args.accelerator]


def _options(args: argparse.Namespace, file: PlanConfig | None) -> EngineOptions:
    engine = EngineConfig() if file is None else file.engine
    return engine_options(engine, None, str(args.config or "engine"))


def _with_context(
    options: EngineOptions, args: argparse.Namespace, file: PlanConfig | None, most: int
) -> EngineOptions:
    """The requested context, the file's, or that of ``plan``'s own mix of requests."""
    asked = args.max_model_len or (file.max_model_len if file is not None else None)
    if asked is not None and most and asked > most:
        raise ConfigError(f"--max-model-len: {asked} is more than the {most} it is made for")
    context = asked or min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
    return dataclasses.replace(options, max_model_len=context)
