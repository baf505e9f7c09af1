"""Small values for the core's tests. Figures are made up unless a name says otherwise."""

import math
import types
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.instances.outcomes import EjectionRules, Outcomes
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.instances.table import Table
from hetero_gateway.core.lengths.predictors import STAGE_TOKENS
from hetero_gateway.core.policies import Policy, PolicyOptions, View, make_policy
from hetero_gateway.core.policies.base import Backlog, Decision
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Reject

# Two unequal machines: SLOW needs three to five times as long and holds an eighth of the tokens.
FAST_CONSTANTS = Constants(5.5e-5, 1e-5, 1e-6, 7.2e-3, 7.5e-8, 8.7e-5, 3.5e-8, 1.01e-2)
SLOW_CONSTANTS = Constants(1.7e-4, 2e-5, 2e-6, 1.1e-2, 2.7e-7, 1.2e-4, 3.4e-7, 2.65e-2)

MANY_TOKENS = 2.0**200


def profile(
    constants: Constants = FAST_CONSTANTS,
    kv_capacity_tokens: int = 800_000,
    max_num_seqs: int = 256,
) -> Profile:
    return Profile("gpu", "model", 1, constants, kv_capacity_tokens, max_num_seqs)


FAST = profile()
SLOW = profile(SLOW_CONSTANTS, 100_000)


def spec(instance_id: str, instance_profile: Profile | None = FAST, **changes: Any) -> InstanceSpec:
    """An available instance that serves the model ``m``."""
    values = {"models": frozenset({"m"}), "profile": instance_profile, "max_model_len": 8192}
    return InstanceSpec(instance_id=InstanceId(instance_id), **(values | changes))


def request(
    prompt_tokens: int = 512, output_tokens: float = 256.0, model: str = "m", sequences: int = 1
) -> Request:
    return Request(model, prompt_tokens, output_tokens, sequences)


def scheduler(
    *specs: InstanceSpec,
    policy: str | Policy = "min-max",
    seed: int = 0,
    options: PolicyOptions | None = None,
    **settings: Any,
) -> Scheduler:
    made = make_policy(policy, options) if isinstance(policy, str) else policy
    result = Scheduler(made, np.random.default_rng(seed), **settings)
    for one in specs:
        result.add(one)
    return result


def fast_instance() -> InstanceState:
    """One in a table of its own."""
    state = Table().join(InstanceId("a"))
    state.set_constants(FAST_CONSTANTS)
    return state


class Changed:
    """A policy in all but what a test changes of it: one that is compiled cannot be."""

    def __init__(self, policy: Policy, **changes: Any) -> None:
        self.__dict__.update(changes, changed=policy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.changed, name)


def placed(s: Scheduler, body: Request, now_s: float = 0.0, **options: Any) -> Ticket:
    """What is not refused; it may wait."""
    ticket = s.place(body, now_s, **options)
    assert isinstance(ticket, Ticket), ticket
    return ticket


def submitted(s: Scheduler, body: Request, now_s: float = 0.0, **options: Any) -> Ticket:
    """It waits for the next pump."""
    return placed(s, body, now_s, at_once=False, **options)


def eject(s: Scheduler, instance_id: str, now_s: float = 0.0, **rules: float) -> Outcomes:
    outcomes = Outcomes(EjectionRules(**rules))
    outcomes.eject(now_s, "reset")
    s.restraints.heed(InstanceId(instance_id), outcomes)
    return outcomes


def is_empty(there: InstanceState) -> bool:
    """All of its sums are exactly 0."""
    sums = (there.load_s, there.kv_tokens, there.in_flight, there.waiting, there.streaming)
    tokens = (there.waiting_prompt, there.waiting_prefill, there.waiting_output, there.context)
    return not any((*sums, *tokens, *there.stages, there.shared_tokens))


def chosen(result: Decision | Reject) -> Decision:
    assert isinstance(result, Decision), result
    return result


def rejected(result: Decision | Reject) -> Reject:
    assert isinstance(result, Reject), result
    return result


def state(s: Scheduler, instance_id: str) -> InstanceState:
    return s.members.table[InstanceId(instance_id)]


def loads(s: Scheduler) -> list[float]:
    return [s.members.snapshot(each).load_s for each in s.members.specs]


def attributes(thing: Any) -> dict[str, Any]:
    """All of one with slots, which are another thing where it is compiled."""
    slots = (types.MemberDescriptorType, types.GetSetDescriptorType)
    names = [name for name, value in vars(type(thing)).items() if isinstance(value, slots)]
    return {name: getattr(thing, name) for name in names}


def view_of(s: Scheduler, body: Request, now_s: float = 0.0) -> View:
    """What the policy would see of a request now."""
    eligible = s.members.eligible(body, ())
    assert not isinstance(eligible, Reject)
    return s._decider.views.view(body, eligible, now_s, s.queues.get(body.model), keep=False)


def candidates(
    load: list[float],
    request_time_s: list[float] | None = None,
    kv_usage: list[float] | None = None,
    in_flight: list[int] | None = None,
    capacity: list[float] | None = None,
    weight: list[float] | None = None,
) -> View:
    """Candidates i0, i1, … in slots 0, 1, …; what is not given is the same for all.

    Nobody is in the queue.
    """
    size = len(load)
    states, members = [], []
    for i in range(size):
        state = InstanceState(InstanceId(f"i{i}"), i)
        state.load_s = load[i]
        state.kv_tokens = int(kv_usage[i] * MANY_TOKENS) if kv_usage else 0
        state.in_flight = in_flight[i] if in_flight else 0
        states.append(state)
        # A request takes p2 whatever its lengths, and no usage is rounded.
        p2 = request_time_s[i] if request_time_s else 1.0
        limits = (MANY_TOKENS, math.inf, 256.0, weight[i] if weight else 1.0, 264.0)
        per_s = capacity[i] if capacity else 1.0
        members.append(Member(0.0, p2, *[0.0] * 7, *limits, per_s, float(i)))
    backlog = Backlog(
        queued=0,
        idle_s=0.0,
        mean_gap_s=1.0,
        mean_lengths=None,
        typical_request_time_s=[1.0] * size,
        residual=[256.0] * len(STAGE_TOKENS),
        profiled=True,
        stands_in=False,
    )
    ids = tuple(state.instance_id for state in states)
    return View(request(), ids, states, members, [512.0] * size, 768, None, 2.0, 0.0, backlog)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any profile of a plausible machine, constants of 0 among them."""

    def constant(low: float, high: float) -> float:
        return draw(st.one_of(st.just(0.0), st.floats(low, high)))

    constants = Constants(
        constant(1e-6, 1e-3),
        constant(1e-6, 1e-3),
        constant(1e-8, 1e-5),
        constant(1e-4, 1e-1),
        constant(1e-9, 1e-6),
        constant(1e-6, 1e-3),
        constant(1e-9, 1e-6),
        draw(st.floats(1e-4, 1e-1)),
        constant(1e-12, 1e-8),
    )
    return profile(constants, draw(st.integers(1, 2_000_000)), draw(st.integers(1, 1024)))
