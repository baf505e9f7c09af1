"""The configured output-length predictor, and the guard around installed ones.

A predictor of the user's own is an installed package's entry point (docs/design/predictors.md).
Whatever it does, no request fails because of it: a prediction that it cannot give comes from the
bucket means, which learn beside it. Each kind of failure is logged once and counted.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from hetero_gateway.core.lengths.length_model import TrainedPredictor
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    ConstantPredictor,
    LengthFeatures,
    NormalPredictor,
    OutputLengthPredictor,
)
from hetero_gateway.core.policies import POLICY_NAMES, make_policy
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.length_model_file import read_length_model
from hetero_gateway.files.policies import made_by
from hetero_gateway.files.scheduler_config import PREDICTOR_GROUP, PredictorConfig, installed

_log = logging.getLogger(__name__)

# While it predicts, no byte of any stream moves: from 20 ms on a reader notices.
SLOW_S = 0.02
_MOST_TOKENS = 1e9


@dataclass(eq=False)
class GuardedPredictor:
    """Contains the failures of an installed predictor.

    Args:
        name: of the entry point, for the log.
        predictor: made by it.
        fallback: predicts if the other one fails; learns from every request.
        failures: counted by reason: ``exception``, ``invalid`` (no number of at least 0),
            ``slow`` (above SLOW_S; its value is used).
    """

    _name: str
    _predictor: OutputLengthPredictor
    _fallback: OutputLengthPredictor
    _failures: Counter[str]

    def predict(self, features: LengthFeatures) -> float:
        start_s = time.perf_counter()
        try:
            tokens = float(self._predictor.predict(features))
        except Exception as error:
            self._count("exception", error)
            return self._fallback.predict(features)
        took_s = time.perf_counter() - start_s
        if took_s > SLOW_S:
            self._count("slow", f"{took_s * 1000:.0f} ms, in which no stream moves")
        if not 0 <= tokens <= _MOST_TOKENS:  # NaN is neither
            self._count("invalid", f"{tokens} output tokens")
            return self._fallback.predict(features)
        return max(1.0, tokens)

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        self._fallback.observe(features, output_tokens)
        try:
            self._predictor.observe(features, output_tokens)
        except Exception as error:
            self._count("exception", error)

    def _count(self, reason: str, detail: str | Exception) -> None:
        if not self._failures[reason]:
            if isinstance(detail, Exception):
                detail = _place(detail)  # only once: it reads source files
            _log.warning(
                "length predictor %s: %s: %s; later failures are only counted",
                self._name,
                reason,
                detail,
            )
        self._failures[reason] += 1


def _place(error: Exception) -> str:
    # Without its message, which may quote the prompt.
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f" at {Path(last.filename).name}:{last.lineno}" if last else ""
    return type(error).__name__ + where


def predictor_settings(config: GatewayConfig) -> tuple[str, PredictorConfig, int]:
    """The inputs of a predictor: its kind first."""
    scheduling = config.scheduler
    kind = scheduling.predictor.kind
    if kind is None:
        name = scheduling.policy
        kind = make_policy(name).default_predictor if name in POLICY_NAMES else "bucket-mean"
    return kind, scheduling.predictor, scheduling.seed


def make_predictor(
    config: GatewayConfig, base_dir: Path, failures: Counter[str]
) -> OutputLengthPredictor:
    """Make the predictor of ``scheduler.predictor``.

    Args:
        config: the whole configuration.
        base_dir: what a trained model's file is relative to.
        failures: counts those of an installed predictor.

    Raises:
        ConfigError: a trained model's file is not good, or an installed one cannot be made.
    """
    kind, settings, seed = predictor_settings(config)
    bucket_mean = BucketMeanPredictor(settings.mean_tokens, settings.prior_requests)
    if kind == "bucket-mean":
        return bucket_mean
    if kind == "constant":
        return ConstantPredictor(settings.mean_tokens)
    if kind == "normal":
        import numpy as np  # only needed here: 13 MB

        rng = np.random.default_rng([seed, 1])
        return NormalPredictor(settings.mean_tokens, settings.sd_tokens, rng)
    if kind == "trained":
        assert settings.file is not None  # required by the schema
        return TrainedPredictor(read_length_model(base_dir / settings.file))
    foreign = _load(kind, installed(PREDICTOR_GROUP)[kind], settings.options)
    return GuardedPredictor(kind, foreign, bucket_mean, failures)


def _load(name: str, entry_point: EntryPoint, options: dict[str, Any]) -> OutputLengthPredictor:
    where = f"scheduler.predictor: {name} ({entry_point.value})"
    predictor: OutputLengthPredictor = made_by(entry_point, options, where)
    for method in ("predict", "observe"):
        if not callable(getattr(predictor, method, None)):
            raise ConfigError(f"{where} has made something without a method {method}")
    return predictor
