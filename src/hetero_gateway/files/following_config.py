"""The configuration's section ``following``: instances whose number may change."""

from collections import Counter
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError, named_place
from hetero_gateway.files.instance_config import MOST_RANKS
from hetero_gateway.files.model_names import ModelName
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.yaml_file import StrictModel


class FollowedType(StrictModel):
    """One kind of instance of a model, and bounds of its number."""

    model: ModelName
    """A name that these instances serve."""
    profile: str
    """A built-in profile's name, or a profile file. Instances whose profile has the same
    accelerator and tensor parallelism are of this type."""
    min: int = Field(0, ge=0, le=10_000)
    """At least this many."""
    max: int = Field(ge=1, le=10_000)
    """At most this many."""
    price_per_hour_usd: float | None = Field(None, gt=0)
    """Of one instance; for all types of the model or for none, then accelerators count."""
    data_parallel_ranks: int = Field(1, ge=1, le=MOST_RANKS)
    """Of one instance: engines behind its address, each with the profile."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min > self.max:
            raise ValueError("min: it is above max")
        return self


class FollowingConfig(StrictModel):
    """How many instances the load needs, published as a metric; nothing is started or stopped."""

    types: list[FollowedType] = Field(default_factory=list, max_length=64)
    """Kinds of instances; none: it is off."""
    interval_s: float = Field(60.0, ge=10, le=3600)
    """Between two answers; waiting requests trigger one sooner."""
    startup_s: float = Field(180.0, ge=0, le=7200)
    """From starting an instance until it serves."""
    hold_s: float = Field(600.0, ge=0, le=86400)
    """No instance is removed that was needed within this many seconds."""
    utilisation: float = Field(0.8, gt=0, le=1)
    """The share of the instances' capacity that the load may take."""
    ttft_p99_s: float | None = Field(None, gt=0)
    """Goal for TTFT's 99th percentile, s;"""
    tpot_p99_s: float | None = Field(None, gt=0)
    """and TPOT's. Without both: 85 % of the instances' maximum."""

    @model_validator(mode="after")
    def _check_types(self) -> Self:
        least: Counter[str] = Counter()
        for each in self.types:
            least[each.model] += each.min
        for model, number in least.items():
            if not number:
                raise ValueError(
                    f"types: one type of {model!r} needs a min of 1 or more: without any instance, "
                    "the model is unknown"
                )
            priced = {t.price_per_hour_usd is None for t in self.types if t.model == model}
            if len(priced) > 1:
                raise ValueError(f"types: some of {model!r} have a price and some have none")
        return self


def followed_profiles(config: FollowingConfig, base_dir: Path) -> list[Profile]:
    """The types' profiles, in order.

    Raises:
        ConfigError: one cannot be loaded, or two types of a model are the same.
    """
    profiles = []
    seen: set[tuple[str, str, int]] = set()
    for i, each in enumerate(config.types):
        with named_place(f"types.{i}.profile"):
            profile = load_profile(each.profile, base_dir)
        same = (each.model, profile.gpu, profile.tensor_parallel)
        if same in seen:
            raise ConfigError(
                f"types.{i}: {each.model!r} has {profile.gpu} with tensor parallelism "
                f"{profile.tensor_parallel} twice"
            )
        seen.add(same)
        profiles.append(profile)
    return profiles
