"""``plan`` of a file with ``checkpoints``: one search for each, and the best for the goal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hetero_gateway.errors import HeteroGatewayError

if TYPE_CHECKING:
    from hetero_gateway.files.plan_request import PlanRequest
    from hetero_gateway.planner.plan import Plan


def search_all(
    requests: Sequence[PlanRequest], search: Callable[[PlanRequest], Plan]
) -> tuple[PlanRequest, Plan, list[dict[str, Any]]]:
    """The checkpoint to serve, its plan, and what is said of all; nothing is said of a single one.

    Raises:
        HeteroGatewayError: no checkpoint has a plan.
    """
    from hetero_gateway.planner.checkpoint_choice import Tried, choose, document, line, storage

    if len(requests) == 1:
        return requests[0], search(requests[0]), []
    tried = []
    for request in requests:
        name, stored = request.model_name, storage(request.model)
        try:
            tried.append(Tried(name, stored, search(request)))
        except HeteroGatewayError as error:
            tried.append(Tried(name, stored, None, error))
    chosen = choose(tried, requests[0].question.goals.name)
    plan = tried[chosen].plan
    assert plan is not None
    noted = dataclasses.replace(plan, notes=(*plan.notes, line(tried, chosen)))
    return requests[chosen], noted, document(tried, chosen)
