"""Who may get a request, why the others may not, and that what is decided adds up."""

import math
import threading
from collections import Counter

import numpy as np
import pytest

from hetero_gateway.core.costs.cost_model import request_time_s
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.policies import (
    POLICY_NAMES,
    Candidates,
    PolicyOptions,
    View,
    make_policy,
)
from hetero_gateway.core.policies.base import Choice
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import (
    InstanceId,
    InstanceSpec,
    Outcome,
    Reject,
    RejectReason,
)
from tests.core.builders import (
    FAST,
    SLOW,
    Changed,
    chosen,
    loads,
    profile,
    rejected,
    request,
    scheduler,
    spec,
    state,
    view_of,
)


def run(s: Scheduler, body: Request, count: int) -> Counter[str]:
    """Dispatch the same request so often; nothing finishes."""
    counts: Counter[str] = Counter()
    for _ in range(count):
        decision = chosen(s.choose(body))
        s.dispatch(decision)
        counts[decision.instance_id] += 1
    return counts


def excluded(s: Scheduler, body: Request) -> dict[str, str]:
    rows = chosen(s.choose(body)).explain()
    return {row.instance_id: row.excluded for row in rows if row.excluded is not None}


# Pools


def test_only_instances_that_serve_the_model_are_candidates() -> None:
    s = scheduler(spec("a", models=frozenset({"x"})), spec("b", models=frozenset({"x", "y"})))
    rows = {m: chosen(s.choose(request(model=m))).explain() for m in ("x", "y")}
    assert {row.instance_id for row in rows["x"]} == {"a", "b"}
    assert {row.instance_id for row in rows["y"]} == {"b"}


def test_an_instance_has_one_load_whatever_the_name_it_was_asked_by() -> None:
    names = frozenset({"base", "alias", "lora"})
    s = scheduler(spec("a", models=names), spec("b", models=names))
    first = chosen(s.choose(request(model="base")))
    s.dispatch(first)
    second = chosen(s.choose(request(model="lora")))
    assert second.instance_id != first.instance_id
    row = next(r for r in second.explain() if r.instance_id == first.instance_id)
    assert row.load_s == pytest.approx(first.choice.charge)
    assert row.in_flight == 1


def test_names_that_share_some_instances_see_each_others_load() -> None:
    # x is served by a and b, y by b and c: what x puts on b, y does not.
    s = scheduler(
        spec("a", models=frozenset({"x"})),
        spec("b", models=frozenset({"x", "y"})),
        spec("c", models=frozenset({"y"})),
    )
    assert run(s, request(model="x"), 20) == {"a": 10, "b": 10}
    # c catches up with b first.
    assert run(s, request(model="y"), 10) == {"c": 10}
    assert run(s, request(model="y"), 10) == {"b": 5, "c": 5}


def test_the_candidates_follow_a_change_of_names() -> None:
    s = scheduler(spec("a"))
    assert isinstance(s.choose(request(model="new")), Reject)
    s.replace(spec("a", models=frozenset({"m", "new"})))
    assert chosen(s.choose(request(model="new"))).instance_id == "a"
    s.replace(spec("a", models=frozenset({"new"})))
    assert rejected(s.choose(request(model="m"))).reason is RejectReason.UNKNOWN_MODEL


def test_a_replaced_instance_keeps_its_load() -> None:
    s = scheduler(spec("a"), spec("b"))
    run(s, request(), 10)
    before = loads(s)
    s.replace(spec("a", SLOW, max_model_len=4096))
    assert loads(s) == before


def test_a_removed_instance_settles_what_it_had_and_is_never_chosen_again() -> None:
    s = scheduler(spec("a"), spec("b"))
    dispatches = [s.dispatch(chosen(s.choose(request()))) for _ in range(10)]
    on_a = [d for d in dispatches if d.instance_id == "a"]
    assert set(s.remove(InstanceId("a"))) == set(on_a)
    assert all(d.outcome is Outcome.INSTANCE_REMOVED for d in on_a)
    assert not any(s.settle(d, Outcome.COMPLETED) for d in on_a)
    assert set(run(s, request(), 5)) == {"b"}
    with pytest.raises(KeyError):
        s.remove(InstanceId("a"))


def test_an_instance_in_a_removed_ones_place_starts_empty() -> None:
    s = scheduler(spec("a"))
    late = s.dispatch(chosen(s.choose(request())))
    s.remove(InstanceId("a"))
    s.add(spec("b"))
    row = chosen(s.choose(request())).explain()[0]
    assert (row.load_s, row.kv_usage, row.in_flight) == (0.0, 0.0, 0)
    s.settle(late, Outcome.COMPLETED)
    assert state(s, "b").load_s == 0.0


def test_an_id_can_be_taken_once() -> None:
    s = scheduler(spec("a"))
    with pytest.raises(ValueError, match="'a' exists already"):
        s.add(spec("a"))
    with pytest.raises(KeyError):
        s.replace(spec("b"))


# Who is excluded, and what a refusal says


@pytest.mark.parametrize(
    ("change", "why"), [({"draining": True}, "draining"), ({"available": False}, "unhealthy")]
)
def test_an_instance_that_takes_nothing_is_excluded_and_explained(change, why):
    s = scheduler(spec("a", **change), spec("b", SLOW))
    assert set(run(s, request(), 10)) == {"b"}
    assert excluded(s, request()) == {"a": why}
    s.replace(spec("a"))
    assert excluded(s, request()) == {}
    assert "a" in run(s, request(), 10)


def test_a_name_that_was_never_served_is_told_apart_from_one_that_is_down() -> None:
    s = scheduler(spec("a", available=False), spec("b", draining=True))
    unknown, down = rejected(s.choose(request(model="x"))), rejected(s.choose(request()))
    assert unknown.reason is RejectReason.UNKNOWN_MODEL
    assert "`x`" in unknown.detail
    assert down.reason is RejectReason.NO_AVAILABLE_INSTANCE
    assert "'m'" in down.detail
    assert "a unhealthy" in down.detail
    assert "b draining" in down.detail


def test_while_an_instance_has_not_said_what_it_serves_no_name_is_unknown() -> None:
    s = scheduler(spec("a"), spec("b", models=frozenset(), available=False))
    assert rejected(s.choose(request(model="x"))).reason is RejectReason.NO_AVAILABLE_INSTANCE


def test_a_scheduler_without_instances_knows_no_model() -> None:
    assert rejected(scheduler().choose(request())).reason is RejectReason.UNKNOWN_MODEL


def test_unknown_names_are_not_remembered() -> None:
    s = scheduler(spec("a"))
    for i in range(1000):
        s.choose(request(model=f"x{i}"))
    assert len(s.members.pools) == 0


def test_a_request_that_fits_nowhere_is_refused_with_the_limit_and_its_length() -> None:
    s = scheduler(spec("a", max_model_len=2048), spec("b", max_model_len=4096))
    refusal = rejected(s.choose(request(5000)))
    assert refusal.reason is RejectReason.FITS_NO_INSTANCE
    assert "4096" in refusal.detail
    assert "5000" in refusal.detail
    assert "\n" not in refusal.detail


def test_the_limit_in_a_refusal_is_one_that_some_instance_really_has() -> None:
    # One has the context and the other the memory; no single one has both.
    s = scheduler(
        spec("memory", profile(kv_capacity_tokens=1_000_000), max_model_len=1000),
        spec("context", profile(kv_capacity_tokens=1500), max_model_len=100_000),
    )
    refusal = rejected(s.choose(request(2000, 256.0)))
    assert refusal.reason is RejectReason.FITS_NO_INSTANCE
    assert "1500 tokens" in refusal.detail
    assert "100000" not in refusal.detail


def test_a_refusal_names_the_output_when_that_is_what_does_not_fit() -> None:
    s = scheduler(spec("a", profile(kv_capacity_tokens=1000), max_model_len=None))
    refusal = rejected(s.choose(request(900, 400.0)))
    assert refusal.reason is RejectReason.FITS_NO_INSTANCE
    for figure in ("1000", "900", "400"):
        assert figure in refusal.detail


def test_a_draining_instance_does_not_make_a_request_fit() -> None:
    s = scheduler(spec("a", max_model_len=1024), spec("b", draining=True))
    assert rejected(s.choose(request(2000))).reason is RejectReason.FITS_NO_INSTANCE


# Lengths that are estimates


def test_an_estimated_length_goes_to_the_largest_instance_and_is_never_refused() -> None:
    small = spec("small", profile(kv_capacity_tokens=2000), max_model_len=1024)
    s = scheduler(small, spec("large", profile(kv_capacity_tokens=9000), max_model_len=4096))
    for prompt, output in ((5000, 256.0), (10**12, 1.0), (4095, 10_000.0), (1, 10**9), (4096, 0.0)):
        asked = request(prompt, float(output)).replace(certain_tokens=0)
        for decide in (s.choose, s.explain):
            decision = decide(asked)
            assert decision.instance_id == "large"
            assert decision.request.kv_tokens <= 4096
        ticket = s.place(asked, 0.0)
        s.settle(ticket.dispatch, Outcome.COMPLETED, 1.0)
    assert s.members.snapshot(InstanceId("large")).load_s == 0


def test_an_exact_prompt_is_refused_for_itself_and_not_for_a_predicted_output() -> None:
    s = scheduler(spec("a", profile(kv_capacity_tokens=1000), max_model_len=None))
    fits = s.choose(request(900, 400.0).replace(certain_tokens=901))
    assert fits.request.prompt_tokens == 900
    assert fits.request.predicted_output_tokens == 100
    too_long = s.choose(request(1000, 1.0).replace(certain_tokens=1001))
    assert rejected(too_long).reason is RejectReason.FITS_NO_INSTANCE


def test_an_estimate_is_not_tried_on_a_smaller_instance_than_the_largest() -> None:
    # Its engine would answer that the prompt is too long, which may be wrong.
    s = scheduler(spec("small", max_model_len=1024), spec("large", max_model_len=4096))
    asked = request(5000).replace(certain_tokens=0)
    refusal = rejected(s.choose(asked, [InstanceId("large")]))
    assert refusal.reason is RejectReason.NO_AVAILABLE_INSTANCE


def test_what_continues_on_one_instance_is_made_to_fit_that_one() -> None:
    s = scheduler(spec("small", max_model_len=1024), spec("large", max_model_len=4096))
    decision = s.choose(request(5000).replace(certain_tokens=0, only=InstanceId("small")))
    assert decision.instance_id == "small"
    assert decision.request.prompt_tokens == 1023


# Retries


def test_a_retry_goes_to_another_instance_until_all_were_tried() -> None:
    s = scheduler(spec("a"), spec("b"), spec("c"))
    tried: list[InstanceId] = []
    for _ in range(3):
        decision = chosen(s.choose(request(), tried))
        rows = {r.instance_id: r.excluded for r in decision.explain() if r.excluded is not None}
        assert rows == dict.fromkeys(tried, "tried already")
        tried.append(decision.instance_id)
    assert set(tried) == {"a", "b", "c"}
    refusal = rejected(s.choose(request(), tried))
    assert refusal.reason is RejectReason.NO_AVAILABLE_INSTANCE
    assert "tried" in refusal.detail


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_no_policy_chooses_what_is_excluded(name: str) -> None:
    options = PolicyOptions(single_instance=InstanceId("tried"))
    s = scheduler(
        spec("tried"),
        spec("short", max_model_len=100),
        spec("small", profile(kv_capacity_tokens=100)),
        spec("draining", draining=True),
        spec("unhealthy", available=False),
        spec("other", models=frozenset({"x"})),
        spec("good"),
        spec("slow", SLOW),
        policy=name,
        options=options,
    )
    for _ in range(30):
        decision = chosen(s.choose(request(), [InstanceId("tried")]))
        s.dispatch(decision)
        assert decision.instance_id in {"good", "slow"}
        assert len(decision.explain()) == 7


# What a decision says


def test_every_row_of_a_decision_follows_the_equations() -> None:
    s = scheduler(spec("fast"), spec("slow", SLOW), theta=1.5)
    run(s, request(300, 200.0), 40)
    body = request(1000, 128.0)
    decision = chosen(s.choose(body))
    for row in decision.explain():
        p = FAST if row.instance_id == "fast" else SLOW
        seen = s.members.snapshot(row.instance_id)
        assert row.request_time_s == pytest.approx(request_time_s(p, 1000, 128.0))
        assert row.kv_usage == pytest.approx(seen.kv_tokens / p.kv_capacity_tokens)
        assert row.kv_usage > 0
        assert row.workload == pytest.approx(row.request_time_s * math.exp(1.5 * row.kv_usage))
        assert row.load_s == seen.load_s > 0
        assert row.load_after_s == pytest.approx(row.load_s + row.workload)
        assert row.in_flight == seen.in_flight
        assert row.excluded is None


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_the_load_after_a_decision_is_the_load_after_its_dispatch(name: str) -> None:
    s = scheduler(spec("a"), spec("b", SLOW), spec("c"), policy=name)
    for _ in range(10):
        decision = chosen(s.choose(request()))
        row = next(r for r in decision.explain() if r.instance_id == decision.instance_id)
        s.dispatch(decision)
        assert s.members.snapshot(decision.instance_id).load_s == pytest.approx(
            row.load_after_s, abs=1e-9
        )


def test_a_decision_keeps_the_figures_it_was_made_from() -> None:
    s = scheduler(spec("a"), spec("b", SLOW))
    decision = chosen(s.choose(request()))
    before = decision.explain()
    run(s, request(), 50)
    s.replace(spec("a", SLOW))
    s.remove(InstanceId("b"))
    assert decision.explain() == before


def test_the_figures_of_an_excluded_row_are_absent_and_not_zero() -> None:
    s = scheduler(spec("a"), spec("b"))
    run(s, request(), 10)
    s.replace(spec("b", draining=True))
    row = next(r for r in chosen(s.choose(request())).explain() if r.instance_id == "b")
    assert row.excluded == "draining"
    assert (row.request_time_s, row.workload, row.load_after_s) == (None, None, None)
    # It has five requests on it: a zero would be untrue.
    assert (row.kv_usage, row.load_s, row.in_flight) == (None, None, None)


def test_sequences_multiply_the_cost_and_the_tokens() -> None:
    s = scheduler(spec("a"))
    one, four = (chosen(s.choose(request(sequences=n))).explain()[0] for n in (1, 4))
    assert one.request_time_s is not None
    assert four.request_time_s == pytest.approx(4 * one.request_time_s)
    assert four.workload == pytest.approx(4 * (one.workload or 0))
    s.dispatch(chosen(s.choose(request(512, 256.0, sequences=4))))
    assert state(s, "a").kv_tokens == 4 * 768
    assert state(s, "a").in_flight == 1


def test_choosing_changes_no_load() -> None:
    s = scheduler(spec("a"), spec("b"))
    for _ in range(5):
        s.choose(request())
    assert loads(s) == [0.0, 0.0]
    assert not any(state(s, name).outstanding() for name in "ab")


def test_after_everything_is_settled_every_load_is_zero() -> None:
    s = scheduler(spec("a", SLOW), spec("b"), theta=9.0)
    rng = np.random.default_rng(0)
    dispatches = [
        s.dispatch(chosen(s.choose(request(int(rng.integers(1, 8000)), 500.0)))) for _ in range(500)
    ]
    assert max(loads(s)) > 1e6
    for i in rng.permutation(500):
        assert s.settle(dispatches[i], Outcome.COMPLETED)
    assert loads(s) == [0.0, 0.0]
    assert [state(s, name).kv_tokens for name in "ab"] == [0, 0]


# explain, and randomness


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("randomised", [False, True])
def test_explaining_in_between_changes_no_decision(name: str, randomised: bool) -> None:
    def decisions(explain: bool) -> list[str]:
        specs = [spec(f"i{i}", FAST if i % 2 else SLOW, weight=1.0 + i) for i in range(5)]
        s = scheduler(*specs, policy=name, options=PolicyOptions(randomised=randomised))
        result = []
        for i in range(60):
            body = request(1 + 97 * i % 3000)
            said = [chosen(s.explain(body)).instance_id for _ in range(3 if explain else 0)]
            decision = chosen(s.choose(body))
            # It says what choose then does, random draws included.
            assert set(said) <= {decision.instance_id}
            result.append(decision.instance_id)
            s.dispatch(decision)
        return result

    assert decisions(explain=True) == decisions(explain=False)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_explaining_and_adopting_copy_neither_policy_nor_generator(name: str) -> None:
    policy = Changed(make_policy(name), held=threading.Lock())  # whatever copies it, fails
    s = scheduler(spec("a"), spec("b", SLOW), policy=policy)
    assert chosen(s.explain(request())).instance_id in "ab"
    decision, dispatch = s.adopt(request(), InstanceId("b"), 1.0)
    assert decision.instance_id == "b"
    assert s.settle(dispatch, Outcome.COMPLETED, 2.0)


@pytest.mark.parametrize("name", ["round-robin", "weighted-round-robin"])
def test_adopting_in_between_takes_no_turn(name: str) -> None:
    def decisions(adopts: bool) -> list[str]:
        specs = [spec(f"i{i}", FAST if i % 2 else SLOW, weight=1.0 + i) for i in range(5)]
        s = scheduler(*specs, policy=name)
        result = []
        for i in range(40):
            if i == 20:
                s.add(spec("late"))
            if adopts:
                instance_id = InstanceId("late" if i >= 20 else f"i{i % 5}")
                _, dispatch = s.adopt(request(100), instance_id, float(i))
                s.settle(dispatch, Outcome.CLIENT_DISCONNECTED, float(i))
            result.append(chosen(s.choose(request(1 + 97 * i % 3000), (), float(i))).instance_id)
        return result

    assert decisions(adopts=True) == decisions(adopts=False)


def test_an_explanation_that_fails_takes_no_turn_and_no_draw() -> None:
    def fails(view: View, rng: np.random.Generator) -> Choice:
        rng.random()
        policy.choose(view, rng)
        raise ArithmeticError

    policy = make_policy("round-robin")
    s = scheduler(*map(spec, "abc"), policy=Changed(policy, would_choose=fails))
    following = np.random.default_rng(0).random()
    with pytest.raises(ArithmeticError):
        s.explain(request())
    assert s._decider._draws.random() == following
    assert not s.policy.owed  # type: ignore[attr-defined]


def test_explaining_a_refusal_leaves_the_scheduler_as_it_was() -> None:
    s = scheduler(spec("a", max_model_len=100), policy="round-robin")
    assert rejected(s.explain(request(500))) == rejected(s.choose(request(500)))
    assert chosen(s.choose(request(50))).instance_id == "a"


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_the_same_seed_gives_the_same_decisions(name: str) -> None:
    def decisions(seed: int) -> list[str]:
        specs = [spec(f"i{i}") for i in range(6)]
        s = scheduler(*specs, policy=name, seed=seed, options=PolicyOptions(randomised=True))
        result = []
        for _ in range(60):
            decision = chosen(s.choose(request()))
            s.dispatch(decision)
            result.append(decision.instance_id)
        return result

    assert decisions(7) == decisions(7)
    if name not in {"paper", "single-instance"}:
        assert decisions(7) != decisions(8)


# Unequal, equal and unprofiled instances


def test_equal_instances_share_equally_and_the_faster_gets_more() -> None:
    equal = run(scheduler(*(spec(f"i{i}") for i in range(4))), request(), 400)
    assert set(equal.values()) == {100}
    unequal = run(scheduler(spec("fast"), spec("slow", SLOW)), request(), 400)
    ratio = request_time_s(SLOW, 512, 256) / request_time_s(FAST, 512, 256)
    assert unequal["fast"] / unequal["slow"] >= ratio * 0.9


@pytest.mark.parametrize("name", ["min-max", "least-work", "capacity-weighted"])
def test_unprofiled_instances_are_shared_by_count_and_weight(name: str) -> None:
    s = scheduler(
        spec("a", None), spec("b", None), spec("twice", None, weight=2.0), policy=name, seed=3
    )
    counts = run(s, request(), 400)
    assert counts["twice"] == pytest.approx(200, abs=4)
    assert counts["a"] == pytest.approx(100, abs=4)


@pytest.mark.parametrize("count", [50, 400, 2000])
def test_an_unprofiled_instance_among_profiled_ones_gets_the_share_of_their_mean(count):
    # Also under a backlog far beyond the KV cache, where e^(θ·kvusage) decides.
    p = profile(kv_capacity_tokens=100_000)
    s = scheduler(spec("known", p), spec("unknown", None))
    counts = run(s, request(), count)
    assert counts["unknown"] == pytest.approx(count / 2, rel=0.2)


def test_an_unprofiled_instance_of_twice_the_weight_gets_twice_the_share() -> None:
    s = scheduler(spec("known"), spec("unknown", None, weight=2.0))
    counts = run(s, request(), 600)
    assert counts["unknown"] == pytest.approx(400, rel=0.2)


def test_an_instance_too_small_for_the_reference_request_has_a_small_capacity() -> None:
    # Same machine, but its KV cache holds less than the reference request of 768 tokens.
    s = scheduler(
        spec("large"), spec("small", profile(kv_capacity_tokens=500)), policy="capacity-weighted"
    )
    c = Candidates(view_of(s, request(64, 64.0)))
    capacity = dict(zip(c.ids, c.capacity, strict=True))
    # One at a time, it takes as long as a batch of one does.
    alone_s = request_time_s(profile(max_num_seqs=1), 512, 256)
    assert capacity[InstanceId("small")] == pytest.approx(1 / alone_s)
    assert capacity[InstanceId("large")] > capacity[InstanceId("small")]
    counts = run(s, request(64, 64.0), 200)
    assert counts["small"] < counts["large"]


def test_capacity_is_of_the_reference_request() -> None:
    s = scheduler(spec("a"))
    c = Candidates(view_of(s, request()))
    assert c.capacity[0] == pytest.approx(1 / request_time_s(FAST, 512, 256))


def test_the_context_of_a_model_is_the_longest_available_one() -> None:
    s = scheduler(
        spec("a", max_model_len=1000),
        spec("b", max_model_len=4000),
        spec("c", max_model_len=9000, available=False),
    )
    assert s.members.pool("m").context_tokens == 4000
    assert s.members.pool("x").context_tokens is None
    s.replace(spec("c", max_model_len=None))
    assert s.members.pool("m").context_tokens is None


def test_one_instance_among_many_profiles_is_costed_by_its_own() -> None:
    # The table holds each profile once; every instance must find its own row.
    ps = [profile(Constants(0, 0, 0, 0, 0, 0, 0, 1e-3 * (1 + i))) for i in range(3)]
    specs = [InstanceSpec(InstanceId(f"i{i}"), frozenset({"m"}), ps[i % 3]) for i in range(7)]
    rows = chosen(scheduler(*specs).choose(request())).explain()
    for i, row in enumerate(rows):
        assert row.request_time_s == pytest.approx(request_time_s(ps[i % 3], 512, 256))
