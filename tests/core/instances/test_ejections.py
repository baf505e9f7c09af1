"""Over all instances: how many may be ejected at once, and which requests are at fault."""

from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.instances.ejections import Ejections
from hetero_gateway.core.instances.outcomes import BreakerState, EjectionRules
from hetero_gateway.core.types import InstanceId


class Fleet:
    """Instances a, b, c, … of models, all of them there until ``gone``."""

    def __init__(self, **models: str) -> None:
        self.models = {InstanceId(i): names.split() for i, names in models.items()}
        self.gone: set[str] = set()
        self.ejections = Ejections(EjectionRules(), self.pools_of)
        for instance_id in self.models:
            self.ejections.join(instance_id)
        self.now_s = 100.0
        self._next_body = 0

    def pools_of(self, instance_id: InstanceId) -> list[list[InstanceId]]:
        return [
            [i for i, names in self.models.items() if model in names and i not in self.gone]
            for model in self.models[instance_id]
        ]

    def fail(self, instance_id: str, body: int | None = None, times: int = 5) -> None:
        for _ in range(times):
            self._next_body -= 1
            mark = self._next_body if body is None else body
            self.ejections.failed(InstanceId(instance_id), self.now_s, None, "reset", mark)

    def succeed(self, instance_id: str, body: int) -> None:
        mark = body if self.ejections.suspects else None
        self.ejections.succeeded(InstanceId(instance_id), self.now_s, None, mark)

    @property
    def ejected(self) -> str:
        return "".join(i for i in self.models if self.ejections[i].ejected)


def test_of_one_none_is_ejected_and_of_several_half() -> None:
    for size, most in [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]:
        fleet = Fleet(**dict.fromkeys("abcde"[:size], "m"))
        for name in "abcde"[:size]:
            fleet.fail(name, times=50)
        assert len(fleet.ejected) == most


def test_each_model_keeps_half_of_its_instances() -> None:
    fleet = Fleet(a="m x", b="m", c="m", d="m")
    fleet.fail("a", times=50)
    assert fleet.ejected == ""  # it is the only one with x


def test_who_is_down_is_no_part_of_the_pool() -> None:
    fleet = Fleet(a="m", b="m")
    fleet.gone = {"b"}
    fleet.fail("a", times=50)
    assert fleet.ejected == ""


def test_one_that_fails_is_ejected_as_soon_as_another_is_back() -> None:
    fleet = Fleet(a="m", b="m")
    fleet.fail("a")
    fleet.fail("b")
    assert fleet.ejected == "a"
    fleet.ejections[InstanceId("a")].reprieve(fleet.now_s)
    fleet.fail("b", times=1)
    assert fleet.ejected == "b"


def test_when_others_go_the_ejection_that_would_end_first_ends_now() -> None:
    fleet = Fleet(a="m", b="m", c="m", d="m")
    fleet.fail("b")
    fleet.now_s += 1
    fleet.fail("a")
    assert fleet.ejected == "ab"
    assert fleet.ejections.review(fleet.now_s) == []
    fleet.gone = {"c"}
    assert fleet.ejections.review(fleet.now_s) == ["b"]
    assert fleet.ejections[InstanceId("b")].breaker is BreakerState.SLOW_START
    fleet.gone = {"c", "d"}
    assert fleet.ejections.review(fleet.now_s) == []  # a of two
    fleet.gone = {"b", "c", "d"}
    assert fleet.ejections.review(fleet.now_s) == ["a"]


def test_a_poisonous_request_ejects_nobody() -> None:
    fleet = Fleet(a="m", b="m", c="m")
    for _ in range(20):
        for name in "abc":
            fleet.fail(name, body=7, times=1)
    assert fleet.ejected == ""
    assert all(fleet.ejections[i].ring.failed == 0 for i in fleet.models)


def test_many_of_them_at_once_eject_one_until_the_next_instance_fails_too() -> None:
    fleet = Fleet(a="m", b="m")
    fleet.fail("a", body=7)
    assert fleet.ejected == "a"
    fleet.fail("b", body=7, times=1)
    assert fleet.ejected == ""


def test_a_request_that_is_answered_well_at_last_counts_against_all_that_failed_it() -> None:
    fleet = Fleet(a="m", b="m", c="m", d="m")
    for body in range(5):
        fleet.fail("a", body=body, times=1)
        fleet.fail("b", body=body, times=1)
    assert fleet.ejected == ""
    for body in range(5):
        fleet.succeed("c", body)
    assert fleet.ejected == "ab"


def test_the_same_harmless_request_again_and_again_counts_each_time() -> None:
    fleet = Fleet(a="m", b="m")
    for _ in range(4):
        fleet.fail("a", body=7, times=1)
        fleet.succeed("b", 7)
    fleet.fail("a", body=7, times=1)
    assert fleet.ejected == "a"


def test_what_is_remembered_of_requests_is_bounded_and_ends() -> None:
    fleet = Fleet(a="m", b="m", c="m")
    for body in range(10_000):
        fleet.fail("abc"[body % 3], body=body, times=1)
    assert len(fleet.ejections.suspects) <= 256
    fleet.now_s += 61
    fleet.ejections.forget(fleet.now_s)
    assert not fleet.ejections.suspects


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.sampled_from(["fails", "succeeds", "goes", "comes", "is asked"]),
            st.integers(0, 5),
        ),
        max_size=200,
    )
)
def test_never_more_than_half_of_a_model_is_ejected(events: list[tuple[str, str, int]]) -> None:
    fleet = Fleet(a="m", b="m x", c="m x", d="x y", e="y", f="y m")
    for name, event, body in events:
        fleet.now_s += 0.25
        if event == "fails":
            fleet.fail(name, body=-body if body else None, times=1)
        elif event == "succeeds":
            fleet.succeed(name, -body)
        elif event == "is asked":
            fleet.ejections[InstanceId(name)].bar(fleet.now_s, 0)
        else:
            (fleet.gone.add if event == "goes" else fleet.gone.discard)(name)
            fleet.ejections.review(fleet.now_s)
        for model in "mxy":
            pool = [i for i, m in fleet.models.items() if model in m and i not in fleet.gone]
            out = [i for i in pool if fleet.ejections[i].ejected]
            assert len(out) <= len(pool) // 2
