"""Roles that are found beside a gateway, and by which it then splits requests."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.instances.pairs import Link
from hetero_gateway.core.policies.legs import RolePrice
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.profile_file import profile_document, write_profile_file
from hetero_gateway.planner.roles import RoleQuestion, Roles, roles_for
from hetero_gateway.serve.autoscaling.aside import aside
from hetero_gateway.serve.autoscaling.roles import together
from hetero_gateway.serve.wiring.gateway import Gateway
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.workload import Workload
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.legs import ANSWERS, PROMPTS
from tests.fakes.running import eventually, running_gateway
from tests.fakes.vllm import fake_instances

PAIR = tuple(
    SimulatedInstance(InstanceId(name), made, made)
    for name, made in (
        ("i0", Profile("GPU", "tiny", 1, PROMPTS, 100_000, 64)),
        ("i1", Profile("GPU", "tiny", 1, ANSWERS, 100_000, 64)),
    )
)
LIMITS = {"ttft_s": 2.0, "tpot_s": 0.025}


@asynccontextmanager
async def gateway(
    folder: Path, models: tuple[str, ...] = ("m",), **transfer: Any
) -> AsyncIterator[Gateway]:
    """Over two of each model that can hand over, with 150 requests for each behind it."""
    async with fake_instances(2 * len(models), models=models) as fakes:
        rows = []
        for fake, constants in zip(fakes, (PROMPTS, ANSWERS) * len(models), strict=True):
            file = folder / f"{fake.port}.yaml"
            made = Profile("GPU", "tiny", 1, constants, 100_000, 64)
            write_profile_file(file, profile_document(made, {"how": "derived"}))
            row = {"id": f"i{len(rows)}", "base_url": fake.url, "profile": str(file)}
            row["model"] = models[len(rows) // 2]
            rows.append(row | {"kv_transfer": {"connector": "NixlConnector"} | transfer})
        document = {
            "server": {"port": 0},
            "scheduler": {"split_requests": "roles", "slo": LIMITS},
            "instances": rows,
        }
        async with running_gateway(GatewayConfig.model_validate(document)) as running:
            found = running.gateway
            await eventually(lambda: all(each.up for each in found.fleet.instances.values()))
            found.dataplane.history.extend(
                [(0.5 * i, m, 400 + 5 * i, 30, None, 1) for i in range(150) for m in models]
            )
            yield found


class Asked:
    """Answers in a thread what a process would; ``answers``: in place of what is found."""

    def __init__(self, *answers: Roles | Exception) -> None:
        self.questions: list[RoleQuestion] = []
        self._answers = list(answers)

    async def __call__(self, question: RoleQuestion) -> Roles:
        self.questions.append(question)
        if not self._answers:
            return await asyncio.to_thread(roles_for, question)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_nothing_is_split_until_roles_are_found(tmp_path: Path) -> None:
    async with gateway(tmp_path, gbit_per_s=100) as found:
        legs = found.fleet.scheduler.legs
        assert legs.pairs is not None
        assert legs.roles is None
        assert found.roles is not None
        found.roles.ask = asked = Asked()
        await eventually(lambda: legs.roles is not None)
        (question,) = asked.questions
        assert len(question.mix) == 150
        assert question.slo == (2.0, 0.025)
        assert len(question.links) == 2
        assert found.roles.describe() in ({"i0": "prefill", "i1": "decode"}, {})


def test_a_process_of_its_own_has_the_same_answer() -> None:
    link = Link(0.002, 1e9)
    links = {(a.instance_id, b.instance_id): link for a in PAIR for b in PAIR if a is not b}
    arrivals = 0.5 * np.arange(100)
    mix = Workload(arrivals, np.full(100, 900), np.full(100, 30))
    question = RoleQuestion(PAIR, mix, links, 131072.0, Slo(2.0, 0.025))
    answer = asyncio.run(aside(roles_for, question))
    assert answer is not None
    assert answer == roles_for(question)
    with pytest.raises(HeteroGatewayError, match="ended with 1"):
        asyncio.run(aside(roles_for, dataclasses.replace(question, mix=None)))


async def test_over_slow_links_nothing_is_split(tmp_path: Path) -> None:
    async with gateway(tmp_path, gbit_per_s=0.01, start_s=5.0) as found:
        assert found.roles is not None
        found.roles.ask = asked = Asked()
        await eventually(lambda: bool(asked.questions))
        await asyncio.sleep(30)
        assert found.fleet.scheduler.legs.roles is None


async def test_an_answer_stays_until_there_is_another_and_is_asked_for_less_often(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as found:
        legs = found.fleet.scheduler.legs
        i0, i1 = found.fleet.instances
        roles = {i0: RolePrice(decode_s=10.0), i1: RolePrice(prefill_s=10.0)}
        broken = HeteroGatewayError("the simulation ended with 1: no reason")
        assert found.roles is not None
        found.roles.ask = asked = Asked(roles, broken, *[roles] * 20)
        await eventually(lambda: len(asked.questions) == 2, within_s=100)
        assert legs.roles == roles
        assert found.roles.describe() == {"i0": "prefill", "i1": "decode"}
        await asyncio.sleep(1200)
        assert len(asked.questions) in (6, 7)  # 60, 60, 120, 240, 480 s, …
        # Who comes later has no role, and the others keep theirs.
        found.fleet.publish(found.fleet.instances[i0])
        assert legs.roles == roles


async def test_each_model_has_roles_of_its_own(tmp_path: Path) -> None:
    async with gateway(tmp_path, ("m", "n")) as found:
        legs = found.fleet.scheduler.legs
        assert found.roles is not None
        i0, i1, i2, i3 = found.fleet.instances
        roles = {i2: RolePrice(decode_s=10.0), i3: RolePrice(prefill_s=10.0)}
        found.roles.ask = asked = Asked(None, roles, {i0: RolePrice(decode_s=10.0)}, roles)
        await eventually(lambda: len(asked.questions) == 2)
        assert [{i.instance_id for i in q.instances} for q in asked.questions] == [
            {i0, i1}, {i2, i3},
        ]  # fmt: skip
        assert all(set(q.links) == {(a, b) for a in n for b in n if a != b} for q, n in zip(
            asked.questions, ({i0, i1}, {i2, i3}), strict=True
        ))  # fmt: skip
        await eventually(lambda: legs.roles is not None)
        # Of the first one nothing is split, though the other's are.
        assert (legs.roles, legs.models) == (roles, {"n"})
        await eventually(lambda: len(asked.questions) == 4, within_s=100)
        assert legs.models == {"m", "n"}
        assert set(legs.roles or ()) == {i0, i2, i3}


def test_models_that_share_instances_are_one() -> None:
    sets = [frozenset(names) for names in ("ab", "c", "", "bd", "e", "ce")]
    assert set(together(sets)) == {frozenset("abd"), frozenset("ce")}


async def test_few_requests_say_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path) as found:
        assert found.roles is not None
        found.dataplane.history.__init__()  # type: ignore[misc]
        found.roles.ask = asked = Asked()
        await asyncio.sleep(60)
        assert asked.questions == []
