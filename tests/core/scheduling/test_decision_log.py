"""What is kept of a decision explains it as the decision itself does."""

import pytest

from hetero_gateway.core.policies import POLICY_NAMES
from hetero_gateway.core.scheduling.decision_log import DecisionLog
from tests.core.builders import SLOW, request, scheduler, spec


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("instances", [3, 17])
def test_a_logged_decision_is_explained_like_the_decision(name: str, instances: int) -> None:
    specs = [spec(f"i{i}", SLOW if i % 2 else None) for i in range(instances)]
    s = scheduler(*specs, spec("out", draining=True), policy=name)
    log, placed = DecisionLog(50), []
    for i in range(20):
        ticket = s.place(request(100 + i, 50.0, sequences=1 + i % 2), 0.1 * i)
        assert ticket.decision is not None
        log.append(1e9 + i, b"r%d" % i, ticket.decision, 0.5)
        placed.append(ticket.decision)
    for i, logged in enumerate(log.newest_first()):
        decision = placed[19 - i]
        assert (logged.placed_s, logged.request_id) == (1e9 + 19 - i, f"r{19 - i}")
        assert logged.decision.explain() == decision.explain()
        assert logged.decision.reason(waited_s=logged.waited_s) == decision.reason(waited_s=0.5)
        assert repr(logged.decision.request) == repr(decision.request)
        assert logged.decision.choice.latency_s == decision.choice.latency_s


def test_the_oldest_go_first() -> None:
    s, log = scheduler(spec("a")), DecisionLog(2)
    for i in range(5):
        ticket = s.place(request(), 0.0)
        assert ticket.decision is not None
        log.append(float(i), b"r", ticket.decision, 0.0)
    assert len(log) == 2
    assert [logged.placed_s for logged in log.newest_first()] == [4.0, 3.0]
