"""What a policy is told of an instance that never changes."""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    """What never changes of an instance in a pool: p1..p9 and capacities.

    ``kv_capacity_tokens`` is what usage is measured by; where nobody knows it, it is assumed.
    ``kv_limit_tokens`` is what a request has to fit, without a limit where nobody knows one.
    ``seats``: sequences that are sent to it at most, a few more than ``max_num_seqs``.
    ``capacity``: fitted requests per second. ``kind``: a number that those of one profile share,
    where the same request takes the same time. ``first_token_s``, ``plans_ahead`` (0 or 1),
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
