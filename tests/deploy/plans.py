"""Plans made by hand, for tests of what is written of them."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.instances.pairs import Link
from hetero_gateway.deploy.instances import DeploymentOptions
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.planner.memory import EngineOptions
from hetero_gateway.planner.plan import (
    InstanceType,
    Layout,
    Machine,
    MemoryEstimate,
    Plan,
    PlanCandidate,
    SplitVerdict,
    SystemFigures,
)
from hetero_gateway.planner.sizes import as_size
from hetero_gateway.planner.splitting import Transfers

OPTIONS = DeploymentOptions(
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    served_model_name="llama-3-8b",
    engine=EngineOptions(max_model_len=4096, max_num_batched_tokens=2048),
)


def options(**changes: Any) -> DeploymentOptions:
    names = changes.keys() & EngineOptions.__dataclass_fields__.keys()
    engine = dataclasses.replace(OPTIONS.engine, **{name: changes.pop(name) for name in names})
    return dataclasses.replace(OPTIONS, engine=engine, **changes)


def figures(tokens_per_s: float = 1000.0) -> SystemFigures:
    return SystemFigures(tokens_per_s, tokens_per_s / 2, *[float("nan")] * 6, batch=10.0)


def profile(accelerator: str, tensor_parallel: int) -> Profile:
    """A built-in one's constants under any accelerator's name."""
    like = builtin_profiles()[f"V100-32GB-NVLink2/Llama-3-8B/tp{as_size(tensor_parallel).tensor}"]
    return dataclasses.replace(like, gpu=accelerator)


def instance_type(accelerator: str, tensor_parallel: int) -> InstanceType:
    made = profile(accelerator, tensor_parallel)
    memory = MemoryEstimate(made.kv_capacity_tokens, 1e10, {}, 0.03, False, "fitted")
    return InstanceType(accelerator, tensor_parallel, made, memory, 0.15)


def plan(layouts: Mapping[str, tuple[str, int, Layout]]) -> Plan:
    """By machine id: accelerator, how many, and the best candidate's layout."""
    machines = tuple(Machine(id, name, count) for id, (name, count, _) in layouts.items())
    candidate = PlanCandidate(
        layouts={id: layout for id, (_, _, layout) in layouts.items()},
        estimate_paper_tokens_per_s=900.0,
        estimate_tokens_per_s=950.0,
        simulated=figures(),
        accelerators=sum(sum(layout) for _, _, layout in layouts.values()),
        idle_accelerators=sum(count - sum(layout) for _, count, layout in layouts.values()),
    )
    types = {
        (name, size): instance_type(name, size)
        for name, _, layout in layouts.values()
        for size in layout
    }
    return Plan(machines, types, (candidate,), (), "throughput", "finish-time")


ONE_MACHINE = plan({"v100-box": ("V100-32GB-NVLink2", 8, (4, 2, 1))})
SPLITTING = dataclasses.replace(
    plan({"box": ("V100-32GB-NVLink2", 8, (4, 1, 1)), "10.0.0.2": ("V100-32GB-NVLink2", 1, (1,))}),
    splitting=SplitVerdict(
        Transfers(Link(0.002, 1.25e10)),
        {("V100-32GB-NVLink2", 1): "sm7-tp1"},
        "",
        (2.0, 0.8),
        (1.5, 0.95),
        12.0,
        {("V100-32GB-NVLink2", 1): 1},
    ),
)
TWO_MACHINES = plan(
    {
        "v100-box": ("V100-32GB-NVLink2", 8, (4, 2, 1, 1)),
        "MI box_1": ("MI300X-192GB", 2, (1, 1)),
        "spare": ("V100-32GB-NVLink2", 8, ()),
    }
)
EVERY_VENDOR = plan(
    {
        "v100-box": ("V100-32GB-NVLink2", 8, (4, 4)),
        "mi-box": ("MI300X-192GB", 2, (1, 1)),
        "gaudi-box": ("Gaudi3-128GB", 2, (2,)),
        "ascend-box": ("Ascend-910B-64GB", 1, (1,)),
    }
)
PLANS = [ONE_MACHINE, TWO_MACHINES, EVERY_VENDOR, SPLITTING]
EACH_PLAN = pytest.mark.parametrize(
    ("planned", "emulate"), list(itertools.product(PLANS, (False, True)))
)
