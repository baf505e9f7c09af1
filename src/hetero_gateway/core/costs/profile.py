"""The fitted constants of one (accelerator, model, tensor parallelism), with their checks.

``hetero_gateway.files.gateway_config`` loads them from YAML or from the built-in table.
Paper section 3.1: instances on the same hardware share one profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hetero_gateway.errors import ProfileError

# vLLM's own default for max_num_seqs on cards below 70 GiB (vllm/engine/arg_utils.py).
DEFAULT_MAX_NUM_SEQS = 256
# Share of p8 that idle experts may take off a step.
_MOST_SPARED = 0.98


@dataclass(frozen=True, slots=True)
class Constants:
    """p1..p8 of Eqs. (3) and (4), and p9 of a prefill's attention; finite and at least 0.

    ======  ==============================  ===============
    symbol  multiplies                      unit
    ======  ==============================  ===============
    p1, p5  batch · tokens                  s/(seq·token)
    p2, p6  batch                           s/seq
    p3, p7  tokens                          s/token
    p4, p8  1                               s
    p9      batch · attended pairs          s/(seq·token²)
    ======  ==============================  ===============

    The paper has eight; the ninth multiplies ``cost_model.attended_pairs``. Where it was not fitted
    it is 0, and the times are the paper's.

    Raises:
        ProfileError: names the constant that is negative or not a number, or says that a decode
            step would take no time at all.
    """

    p1: float
    p2: float
    p3: float
    p4: float
    p5: float
    p6: float
    p7: float
    p8: float
    p9: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not math.isfinite(value) or value < 0:
                raise ProfileError(
                    f"constant {f.name} is {value}: it must be finite, in seconds, and 0 or more"
                )
        if self.p5 + self.p6 + self.p7 + self.p8 <= 0:
            raise ProfileError("p5 to p8 are all 0: a decode step must take some time")

    def scaled(self, factor: float, decode_factor: float | None = None) -> Constants:
        """The same machine, ``factor`` times slower; decode steps by their own factor if given."""
        decode = factor if decode_factor is None else decode_factor
        by = dict.fromkeys(("p5", "p6", "p7", "p8"), decode)
        return Constants(*(getattr(self, f.name) * by.get(f.name, factor) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Profile:
    """What the scheduler knows of an instance's hardware.

    Args:
        gpu, model, tensor_parallel: what was profiled.
        constants: p1..p9 in seconds.
        kv_capacity_tokens: KVTotal of the paper, as a number of tokens, for the whole instance.
        max_num_seqs: maximum sequences that the engine runs in one step.
        source: how the constants were obtained (``how``, ``date``, ``note``, ``error``).
        first_token_s: time of a first token beside its steps, s: the server reads the request and
            starts the answer. It occupies nothing and does not depend on load.
        plans_ahead: the engine plans a step while the previous one runs (vLLM's asynchronous
            scheduling), so that a prompt that arrives meanwhile waits one step longer.
        experts_awake_at: a step of fewer tokens leaves some experts of a mixture unread; p8 is that
            of a step that reads all.
        idle_expert_s: time that each token below that saves in a step, s.

    Raises:
        ProfileError: when a capacity is below 1, or a time below 0.
    """

    gpu: str
    model: str
    tensor_parallel: int
    constants: Constants
    kv_capacity_tokens: int
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)
    first_token_s: float = 0.0
    plans_ahead: bool = False
    experts_awake_at: float = 0.0
    idle_expert_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "kv_capacity_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ProfileError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("first_token_s", "experts_awake_at", "idle_expert_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ProfileError(f"{name} is {getattr(self, name)}: it must be 0 or more")

    @property
    def spared_s(self) -> float:
        """``idle_expert_s``, limited so that a part of p8 is left in every step."""
        if self.experts_awake_at <= 0:
            return 0.0
        return min(self.idle_expert_s, _MOST_SPARED * self.constants.p8 / self.experts_awake_at)

    @property
    def name(self) -> str:
        return f"{self.gpu}/{self.model}/tp{self.tensor_parallel}"
