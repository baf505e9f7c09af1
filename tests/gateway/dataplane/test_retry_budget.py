"""How many requests are tried again, and streams continued: gateway/dataplane/retry_budget.py."""

from hetero_gateway.files.gateway_config import RetryConfig
from hetero_gateway.gateway.dataplane.retry_budget import RetryBudget
from hetero_gateway.http.failures import Failure, InstanceError


def test_the_last_of_a_wave_may_go_on_as_those_before_it() -> None:
    """As instances die under it; what was counted while many were open is no debt of the last."""
    budget = RetryBudget(RetryConfig(budget_min=1))
    gone = InstanceError(Failure.RESET, "it died")
    assert all(budget.may_continue(30) for _ in range(30))
    assert all(budget.may_retry(gone, 1, 30) for _ in range(30))
    assert budget.may_continue(1)
    assert budget.may_retry(gone, 1, 1)
    assert not budget.may_retry(gone, 1, 1)
    assert sum(budget.may_continue(1) for _ in range(200)) == 150
    assert not budget.may_continue(1)
