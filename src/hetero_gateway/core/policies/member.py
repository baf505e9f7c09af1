"""The constant properties of an instance, as a policy sees them."""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    """The constant properties of an instance in a pool: p1..p9 and capacities.

    ``kv_capacity_tokens``: what usage is measured by; assumed if unknown.
    ``kv_limit_tokens``: what a request has to fit; unlimited if unknown.
    ``seats``: maximum sequences sent to it, a few more than ``max_num_seqs``.
    ``capacity``: fitted requests per second. ``kind``: a number shared by instances of one profile,
    on which the same request takes the same time. ``first_token_s``, ``plans_ahead`` (0 or 1),
    ``experts_awake_at``, ``idle_expert_s``: as in ``Profile``.
    """

    p1: float
    p2: float
    p3: float
    p4: float
    p5: float
    p6: float
    p7: float
    p8: float
    p9: float
    kv_capacity_tokens: float
    kv_limit_tokens: float
    max_num_seqs: float
    weight: float
    seats: float
    capacity: float
    kind: float
    first_token_s: float = 0.0
    plans_ahead: float = 0.0
    experts_awake_at: float = 0.0
    idle_expert_s: float = 0.0
