"""The planner's data types: machines, instance types, candidates, the plan.

An *instance type* is one engine as it could be deployed: a model on accelerators of one kind, by
its ``Size`` (``sizes``), with its profile and its memory. A *layout* divides one machine into
instances: the size of each, largest first, ``(4, 2, 1, 1)`` of 8 accelerators. An instance that
spans several machines is in the layout of each.
A *candidate* gives every machine a layout. Paper section 3: t_i, p_i, u_i with p_i·t_i = u_i; here
instances of one machine may differ, and accelerators may stay idle if that wins.

Values only; ``search`` finds them, the commands print and write them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.planner.sizes import as_size
from hetero_gateway.planner.splitting import Transfers
from hetero_gateway.sim.alone import Alone

Layout = tuple[int, ...]
Key = tuple[str, int]  # of an instance type: accelerator, and size or tensor parallelism


@dataclass(frozen=True, slots=True)
class Machine:
    """``count`` accelerators of one kind that can work on one instance together (u_i of the paper).

    ``accelerator`` is a name of ``planner.accelerators``. ``price_per_hour_usd`` is of one
    accelerator; None: unknown.
    """

    id: str
    accelerator: str
    count: int
    price_per_hour_usd: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The KV memory of an instance, and the other parts of its accelerators' memory.

    ``parts`` are bytes of each accelerator: "weights", "activations", "CUDA graphs", …
    ``kv_capacity_tokens`` may be below what the longest request needs: then the type is unfit.
    ``uncertainty`` is relative, of the KV bytes (one standard deviation of the model's error on
    deployments it was not fitted to). ``tight``: the verdict would change within that uncertainty.
    """

    kv_capacity_tokens: int
    kv_bytes: float
    parts: Mapping[str, float]
    uncertainty: float
    tight: bool
    how: str  # "paper", "fitted", "measured"


@dataclass(frozen=True, slots=True)
class InstanceType:
    """One engine as it could be deployed on accelerators of one kind.

    ``size`` is a ``Size``, or a tensor parallelism. ``profile.source["how"]`` is the source of its
    times (measured, derived, roofline); ``time_uncertainty`` is relative, of a step's time.
    """

    accelerator: str
    size: int
    profile: Profile
    memory: MemoryEstimate
    time_uncertainty: float


@dataclass(frozen=True, slots=True)
class Unfit:
    """A size that cannot be deployed on a kind of machine, and possible remedies.

    ``shortfall_bytes`` is missing per accelerator, 0 if memory is not the reason.
    """

    accelerator: str
    size: int
    reason: str
    shortfall_bytes: float = 0.0
    remedies: tuple[str, ...] = ()

    @property
    def tensor_parallel(self) -> int:
        return as_size(self.size).tensor


@dataclass(frozen=True, slots=True)
class SystemFigures:
    """The simulator's figures of a candidate at one arrival rate (inf: everything at once).

    Throughput counts prompt and output tokens. ``batch`` is the mean number of sequences that
    an instance runs while it is busy. ``slo_share`` is the share of all requests within the
    limits of each (``Goals.slo``); nan if there are none, or if the rate is inf.
    ``cached_share`` is the share of prompt tokens found in the engines' prefix caches; nan if
    nothing says which prompts begin alike.
    """

    tokens_per_s: float
    output_tokens_per_s: float
    latency_mean_s: float = math.nan
    latency_p99_s: float = math.nan
    ttft_mean_s: float = math.nan
    ttft_p99_s: float = math.nan
    tpot_mean_s: float = math.nan
    tpot_p99_s: float = math.nan
    batch: float = math.nan
    slo_share: float = math.nan
    cached_share: float = math.nan


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """One deployment configuration of all machines.

    Args:
        layouts: by machine id; an unused machine has ``()``.
        estimate_paper_tokens_per_s, estimate_tokens_per_s: Algorithm 1 as printed (padded), and
            unpadded.
        simulated: the whole system in steady state with everything sent at once; its times are
            nan. None if the estimates, or the sum of its instances alone, ruled it out before.
        accelerators: that run an instance.
        idle_accelerators: left over by the layouts, of used machines.
        usd_per_million_tokens: by the simulation, else by its instances alone; None without
            prices. A used machine is paid for whole.
        why_not: one line compared with the best; empty for the best.
        alone_tokens_per_s: the sum of its instances alone; 0 if not known.
        at_rate: the whole system at the plan's ``rate_per_s``; None if it was not simulated or
            cannot hold the rate.
        holds: whether it keeps the plan's goals at that rate; None if that was not asked.
        goodput_per_s: the highest rate, in requests/s, at which it keeps the goals; None if
            that was not computed. If the goal is to maximise it, ``at_rate`` is at this rate.
    """

    layouts: Mapping[str, Layout]
    estimate_paper_tokens_per_s: float
    estimate_tokens_per_s: float
    simulated: SystemFigures | None
    accelerators: int
    idle_accelerators: int
    usd_per_million_tokens: float | None = None
    why_not: str = ""
    alone_tokens_per_s: float = 0.0
    at_rate: SystemFigures | None = None
    holds: bool | None = None
    goodput_per_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """With everything at once, as simulated; 0 if it was not."""
        return self.simulated.tokens_per_s if self.simulated else 0.0


@dataclass(frozen=True, slots=True)
class SplitVerdict:
    """Whether to split requests over the best's instances (``planner.split_plan``).

    Args:
        transfers: over which links.
        groups: by type, of those that can hand over: those of one group can to each other.
        why_not: one line; empty: splitting pays.
        unsplit, split: at the plan's rate, the mean latency, s, and the share within the limits
            of each request (1 if there are none).
        holds_per_s: the highest rate within these limits, split; None if there are none.
        prefills: by type, how many instances should compute prompts; its others should answer.
            Empty: each request is split as is cheapest for it.
    """

    transfers: Transfers
    groups: Mapping[Key, str]
    why_not: str
    unsplit: tuple[float, float] = (math.nan, math.nan)
    split: tuple[float, float] = (math.nan, math.nan)
    holds_per_s: float | None = None
    prefills: Mapping[Key, int] = field(default_factory=dict)

    @property
    def pays(self) -> bool:
        return not self.why_not


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's answer, best candidate first.

    ``types`` are the instance types that can be deployed, by (accelerator, size). ``pareto`` are
    the candidates that no other beats in both throughput and latency. ``alone`` has the types that
    were simulated alone. ``rate_per_s`` is the rate of the reported latencies: the wanted rate, the
    best's goodput, or a share of the best's maximum. ``limits`` describes the limits kept at it;
    empty: there are none. ``lower_bound`` is the least that any set of machines needs to hold the
    rate (``planner.bound``): USD per hour if the goal is cost, accelerators if it is fewest; None
    if not computed. ``splitting``: the gain of splitting requests; None: not requested.
    """

    machines: tuple[Machine, ...]
    types: Mapping[Key, InstanceType]
    candidates: tuple[PlanCandidate, ...]
    unfit: tuple[Unfit, ...]
    goal: str
    policy: str
    pareto: tuple[PlanCandidate, ...] = ()
    notes: tuple[str, ...] = field(default=())
    alone: Mapping[Key, Alone] = field(default_factory=dict)
    rate_per_s: float = 0.0
    mean_prompt_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    limits: str = ""
    lower_bound: float | None = None
    splitting: SplitVerdict | None = None

    @property
    def best_goodput_tokens_per_s(self) -> float | None:
        """Prompt and output tokens at the best's goodput; None if that was not computed."""
        rate_per_s = self.best.goodput_per_s
        if rate_per_s is None:
            return None
        return rate_per_s * (self.mean_prompt_tokens + self.mean_output_tokens)

    @property
    def best(self) -> PlanCandidate:
        return self.candidates[0]
