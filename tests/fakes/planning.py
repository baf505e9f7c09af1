"""Instance types made of numbers, for the planner's tests."""

import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.planner import question
from hetero_gateway.planner.plan import InstanceType, MemoryEstimate
from hetero_gateway.sim import alone, experiment
from hetero_gateway.sim.cluster import Records, simulate
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths

# So short that simulations take little time.
LENGTHS = LogNormalLengths(LogNormal(120, 0.6, 600), LogNormal(40, 0.6, 200))
Types = dict[tuple[str, int], InstanceType]


@pytest.fixture(autouse=True, scope="module")
def compiled_plans(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whole systems are simulated compiled where numba is there, in a tenth of the time.

    Their records are the same to the last bit, as tests/sim/compiled shows. Who imports this is
    grouped with what compiles (tests/conftest.py). Where the tests that compile are left out, so
    is compiling: it takes longer than what the others simulate.
    """
    compiled = can_compile() and "not system" not in request.config.option.markexpr

    def run(*args: Any, **options: Any) -> Records:
        return remembered(simulate, *args, **options | {"compiled": compiled})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(question, "simulate", run)
        yield


RUNS: dict[bytes, Any] = {}


def remembered(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What it returns; of a question that has been asked before, what it returned then.

    Simulations read no clock and draw nothing without a seed (tests/sim shows it), and the tests of
    the planner ask for every second one of them again.
    """
    shortened = alone._REQUESTS, alone._BATCHES
    asked = pickle.dumps((run.__qualname__, shortened, args, sorted(options.items())))
    if asked not in RUNS:
        RUNS[asked] = run(*args, **options)
    return RUNS[asked]


@pytest.fixture(autouse=True, scope="module")
def one_run_of_each_alone() -> Iterator[None]:
    """One instance alone is simulated once for all that ask for the same."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (question, experiment):
            patch.setattr(module, "run_alone", functools.partial(remembered, alone.run_alone))
        patch.setattr(
            question, "simulate_alone", functools.partial(remembered, alone.simulate_alone)
        )
        yield


@pytest.fixture(autouse=True, scope="module")
def short_runs() -> Iterator[None]:
    """One instance alone is simulated with fewer requests, where a test imports this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alone, "_REQUESTS", 300)
        yield


def instance_type(
    accelerator: str = "gpu",
    t: int = 1,
    *,
    speed: float = 1.0,
    all_reduce_s: float = 1e-3,
    kv_tokens: int | None = None,
    max_num_seqs: int = 64,
    uncertainty: float = 0.1,
    tight: bool = False,
    constants: Constants | None = None,
) -> InstanceType:
    """Work shared by t accelerators, an overhead that is not, and weights once an instance."""
    links = t.bit_length() - 1
    fixed_s = (20e-3 / t + 2e-3) / speed + links * all_reduce_s
    made = constants or Constants(
        1e-4 / t / speed, 0.0, 0.0, fixed_s, 3e-7 / t / speed, 1e-4 / speed, 0.0, fixed_s
    )
    tokens = kv_tokens if kv_tokens is not None else 12_000 * t - 6_000
    profile = Profile(accelerator, "model", t, made, tokens, max_num_seqs, {"how": "derived"})
    parts = {"weights": 16e9 / t}
    memory = MemoryEstimate(tokens, tokens * 131_072.0, parts, 0.05, tight, "fitted")
    return InstanceType(accelerator, t, profile, memory, uncertainty)


def types_of(*accelerators: str, sizes: tuple[int, ...] = (1, 2, 4), **options: float) -> Types:
    return {
        (a, t): instance_type(a, t, **options)  # type: ignore[arg-type]
        for a in accelerators
        for t in sizes
    }


def changed(
    types: Mapping[tuple[str, int], InstanceType],
    *,
    kv: float = 1.0,
    times: Mapping[str, float] | None = None,
) -> Types:
    """With so many times the KV tokens, and constants so many times as long."""
    result: Types = {}
    for key, found in types.items():
        constants = dataclasses.replace(
            found.profile.constants,
            **{
                name: getattr(found.profile.constants, name) * factor
                for name, factor in (times or {}).items()
            },
        )
        tokens = int(found.profile.kv_capacity_tokens * kv)
        result[key] = dataclasses.replace(
            found,
            profile=dataclasses.replace(
                found.profile, constants=constants, kv_capacity_tokens=tokens
            ),
            memory=dataclasses.replace(found.memory, kv_capacity_tokens=tokens),
        )
    return result
