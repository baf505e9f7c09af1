"""Profile files: their schema, the loader, and the profiles that ship with the package.

docs/reference/configuration.md lists every field; a test compares the two.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from hetero_gateway.core.costs.profile import DEFAULT_MAX_NUM_SEQS, Constants, Profile
from hetero_gateway.core.nearest import nearest_names
from hetero_gateway.errors import ConfigError, ProfileError
from hetero_gateway.files.package_data import table
from hetero_gateway.files.whole_file import write_document
from hetero_gateway.files.yaml_file import StrictModel, parse_model, read_yaml


class PartSourceModel(StrictModel):
    """How well one equation fits, on batches not used for the fit."""

    r2: float | None = None
    median_error: float | None = Field(None, ge=0)
    worst_error: float | None = Field(None, ge=0)
    eq_3_error: float | None = Field(None, ge=0)
    attention_error: float | None = Field(None, ge=0)  # of files from before p9
    validation: str = ""
    samples: int | None = Field(None, ge=0)
    outliers: int | None = Field(None, ge=0)


class SourceModel(StrictModel):
    """How a profile's constants were obtained."""

    how: Literal["measured", "derived", "roofline"]
    date: Any = None
    note: str = ""
    error: dict[str, float] = Field(default_factory=dict)
    engine: str | None = None
    block_size: int | None = Field(None, ge=1)
    max_model_len: int | None = Field(None, ge=1)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    discarded: dict[str, int] = Field(default_factory=dict)
    fit: dict[Literal["prefill", "decode"], PartSourceModel] = Field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)
    unidentified: list[str] = Field(default_factory=list)


class ProfileModel(StrictModel):
    """A profile file."""

    gpu: str
    model: str
    tensor_parallel: int = Field(ge=1)
    constants: dict[str, float]
    kv_capacity_tokens: int = Field(ge=1)
    max_num_seqs: int = Field(DEFAULT_MAX_NUM_SEQS, ge=1)
    first_token_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    plans_ahead: bool = False
    experts_awake_at: float = Field(0.0, ge=0, allow_inf_nan=False)
    idle_expert_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    source: SourceModel | None = None

    @field_validator("constants")
    @classmethod
    def _check_names(cls, value: dict[str, float]) -> dict[str, float]:
        known = [f.name for f in fields(Constants)]
        wanted = [f.name for f in fields(Constants) if f.default is MISSING]
        if missing := [name for name in wanted if name not in value]:
            raise ValueError(f"{', '.join(missing)} missing; all of p1 to p8 are needed")
        if unknown := [name for name in value if name not in known]:
            raise ValueError(f"unknown constant {unknown[0]}; only p1 to p9 exist")
        return value

    def to_core(self) -> Profile:
        told = self.model_dump()
        source = told["source"] or {}
        return Profile(**told | {"constants": Constants(**self.constants), "source": source})


def load_profile(name_or_file: str, base_dir: Path | None = None) -> Profile:
    """A built-in profile by name, or a profile file (relative to ``base_dir``).

    Raises:
        ConfigError: unknown name (with the nearest ones), or the file's error.
    """
    if name_or_file.endswith((".yaml", ".yml")):
        path = (base_dir or Path()) / name_or_file
        try:
            return parse_model(ProfileModel, read_yaml(path), str(path)).to_core()
        except ProfileError as error:
            raise ConfigError(f"{path}: constants: {error}") from error
    profiles = builtin_profiles()
    if name_or_file in profiles:
        return profiles[name_or_file]
    near = nearest_names(name_or_file, profiles, least=0.3)
    hint = f"; the nearest built-in ones: {', '.join(near)}" if near else ""
    raise ConfigError(f"no profile is named {name_or_file[:200]!r} (a file ends in .yaml){hint}")


def profile_document(
    profile: Profile, source: Mapping[str, Any], *, speed: float = 1.0
) -> dict[str, Any]:
    """The file of a profile, of an instance that is this many times faster; ``source`` as given."""
    constants = asdict(profile.constants.scaled(1 / speed))
    if not constants["p9"]:
        del constants["p9"]  # it was not fitted: the file is as the paper's eight are
    document = {
        "gpu": profile.gpu,
        "model": profile.model,
        "tensor_parallel": profile.tensor_parallel,
        "constants": {name: float(value) for name, value in constants.items()},
        "kv_capacity_tokens": int(profile.kv_capacity_tokens),
        "max_num_seqs": int(profile.max_num_seqs),
    }
    if profile.first_token_s:
        document["first_token_s"] = float(profile.first_token_s / speed)
    if profile.plans_ahead:
        document["plans_ahead"] = True
    if profile.idle_expert_s:
        document["experts_awake_at"] = float(profile.experts_awake_at)
        document["idle_expert_s"] = float(profile.idle_expert_s / speed)
    return document | {"source": dict(source)}


def profile_text(document: Mapping[str, Any]) -> str:
    """A profile file's text, in the document's order."""
    text: str = yaml.safe_dump(
        _without_references(dict(document)), sort_keys=False, allow_unicode=True, width=100
    )
    return text


def write_profile_file(path: Path, document: Mapping[str, Any]) -> None:
    """Write a profile file whole. Raises ConfigError: it cannot be written."""
    write_document(path, profile_text(document))


def _without_references(value: Any) -> Any:
    """Escape ``${NAME}``, which would be replaced from the environment of whoever loads the file.

    A model's name and an engine's version are the engine's own statements.
    """
    if isinstance(value, Mapping):
        return {key: _without_references(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_references(inner) for inner in value]
    return value.replace("${", "$ {") if isinstance(value, str) else value


@cache
def builtin_profiles() -> Mapping[str, Profile]:
    """The built-in profiles, by name (``GPU/MODEL/tpN``).

    Their constants are rooflines or derived from public measurements, as ``source`` says.
    """
    result = {}
    for row in table("instance_profiles.csv"):
        honesty = row["honesty"]
        profile = Profile(
            gpu=row["gpu"],
            model=row["model"],
            tensor_parallel=int(row["tp"]),
            constants=Constants(*(float(row[f"p{i}"] or 0) for i in range(1, 10))),
            kv_capacity_tokens=int(row["kv_tokens_capacity"]),
            source={
                "how": "roofline" if honesty == "roofline" else "derived",
                "note": f"{honesty}; {row['source']}",
                "error": {
                    "prefill": float(row["fit_mape_prefill"]),
                    "decode": float(row["fit_mape_decode"]),
                },
            },
        )
        result[profile.name] = profile
    return result
