"""``predictor fit``: train an output-length model on a trace, or on a gateway's past requests."""

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetero_gateway.cli.reports.report import print_table
from hetero_gateway.core.lengths.length_model import LengthModel, TrainedPredictor, leaf_count
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor, ConstantPredictor
from hetero_gateway.core.lengths.training import (
    ERROR_BUCKETS,
    MIN_ROWS,
    LengthSamples,
    error_of,
    errors_by_prompt,
    fit_length_model,
    replay,
)
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.length_model_file import write_length_model
from hetero_gateway.files.trace import TraceRequest, parse_trace, read_trace
from hetero_gateway.lab.load.admin import fetch_csv, printable


def run(args: argparse.Namespace) -> int:
    """Train, print, write."""
    rows, source = _rows(args)
    samples = length_samples(rows)
    earlier = round(len(samples) * (1 - args.hold_out))
    if earlier < MIN_ROWS:
        raise ConfigError(
            f"{source}: {len(samples)} requests, of which {earlier} are to train on; "
            f"at least {MIN_ROWS} are needed"
        )
    seen, held_out = samples.part(0, earlier), samples.part(earlier, len(samples))
    predictions = predict_held_out(fit_length_model(seen), seen, held_out)
    model = fit_length_model(samples)
    report = _report(source, model, predictions, held_out, trained=len(samples))
    about = {"source": source, "requests": len(samples), "held_out": report["held_out"]["total"]}
    about["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    write_length_model(args.output, model, about)
    if args.json:
        print(json.dumps(report | {"file": str(args.output)}))
        return 0
    _print_report(report)
    print(f"wrote {args.output}", file=sys.stderr)
    return 0


def _rows(args: argparse.Namespace) -> tuple[list[TraceRequest], str]:
    """The requests in order of arrival, and a name for their source."""
    if args.requests is not None:
        rows, source = read_trace(args.requests), args.requests.name
    else:
        source = "gateway"  # no address: the file may be shared
        text = fetch_csv(args.from_gateway, args.admin_key_env, "/admin/requests")
        rows = parse_trace(text, f"{args.from_gateway}/admin/requests")
    if all(row.arrival_s is not None for row in rows):
        rows.sort(key=lambda row: row.arrival_s or 0.0)
    return rows, source


def length_samples(rows: Sequence[TraceRequest]) -> LengthSamples:
    """Trace rows as the core's type."""
    limits = [np.inf if row.max_tokens is None else row.max_tokens for row in rows]
    return LengthSamples(
        np.array([row.input_tokens for row in rows], float),
        np.array(limits, float),
        np.array([row.output_tokens for row in rows], float),
        [row.model for row in rows],
    )


def predict_held_out(
    model: LengthModel, seen: LengthSamples, held_out: LengthSamples
) -> dict[str, Any]:
    """Each predictor's predictions for later requests, after learning from the earlier ones.

    Returns:
        Predicted tokens, one array per predictor; each learns as it goes, as in the gateway.
    """
    mean_tokens = float(seen.output_tokens.mean())
    bucket_mean = BucketMeanPredictor(mean_tokens)
    replay(bucket_mean, seen)
    return {
        "mean": replay(ConstantPredictor(mean_tokens), held_out),
        "bucket-mean": replay(bucket_mean, held_out),
        "trained": replay(TrainedPredictor(model), held_out),
        "oracle": held_out.output_tokens,
    }


def _report(
    source: str,
    model: LengthModel,
    predictions: Mapping[str, Any],
    held_out: LengthSamples,
    *,
    trained: int,
) -> dict[str, Any]:
    """The document of ``--json``."""
    total = {
        name: dataclasses.asdict(error_of(predicted, held_out))
        for name, predicted in predictions.items()
    }
    by_bucket = {name: errors_by_prompt(p, held_out) for name, p in predictions.items()}
    buckets = []
    for i in range(len(ERROR_BUCKETS) + 1):
        errors = {name: rows[i] for name, rows in by_bucket.items()}
        if all(error is not None for error in errors.values()):
            ends = {"above": 0 if i == 0 else ERROR_BUCKETS[i - 1], "up_to": None}
            if i < len(ERROR_BUCKETS):
                ends["up_to"] = ERROR_BUCKETS[i]
            described = {k: dataclasses.asdict(e) for k, e in errors.items() if e is not None}
            buckets.append({"prompt_tokens": ends, "errors": described})
    return {
        "source": source,
        "requests": trained,
        "leaves": {name: leaf_count(tree) for name, tree in sorted(model.trees.items())},
        "held_out": {"total": total, "buckets": buckets},
    }


def _print_report(report: Mapping[str, Any]) -> None:
    held_out = report["held_out"]
    parts = [(_bucket_name(b["prompt_tokens"]), b["errors"]) for b in held_out["buckets"]]
    rows = [
        (
            *(name, str(error["requests"]), predictor, f"{error['mae_tokens']:.1f}"),
            *(f"{error['bias_tokens']:+.1f}", f"{error['rmse_tokens']:.1f}"),
        )
        for name, errors in [*parts, ("all", held_out["total"])]
        for predictor, error in errors.items()
    ]
    later = held_out["total"]["mean"]["requests"]
    print(
        f"{report['source']}: {report['requests']} requests; error on the last {later}, in tokens"
    )
    print_table(("prompt tokens", "requests", "predictor", "MAE", "bias", "RMSE"), rows)
    for name, leaves in report["leaves"].items():
        print(f"{printable(name) or 'all models'}: {leaves} leaves")


def _bucket_name(ends: Mapping[str, int | None]) -> str:
    if ends["up_to"] is None:
        return f"above {ends['above']}"
    return f"{ends['above'] or 0}-{ends['up_to']}"
