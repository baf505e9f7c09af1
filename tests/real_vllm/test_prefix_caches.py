"""Prefix caches of real engines: blocks of 128 tokens on a CPU. One of the two servers says in its
answers what was cached (``--enable-prompt-tokens-details``), of the other only its counters do.
"""

import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from real_vllm.cluster import PATIENCE_S, Cluster, Figure
from real_vllm.servers import ALIASES, SERVED_NAME, TELLS_CACHED, wait_until

pytestmark = pytest.mark.real_vllm

CHAT = "/v1/chat/completions"
# 3 000 such words are 3 000 tokens. Less where vLLM is slow: a server may take minutes for so many.
WORDS = ("self", "return", "import", "None", "class", "value", "name", "data", "if", "not")
LONG_WORDS = int(os.environ.get("HETERO_GATEWAY_REAL_VLLM_WORDS", "3000"))
# What the slow one has to compute of so much is less than the fast one: it goes there by itself.
LONG = LONG_WORDS >= 3000
FULL_TRUST = 0.9


def words(count: int, seed: object) -> str:
    """Text that no other seed begins with."""
    rng = random.Random(str(seed))
    return f"{rng.random()} " + " ".join(rng.choices(WORDS, k=count))


class Talk:
    """A conversation whose first turn is long."""

    numbers = itertools.count(time.time_ns())

    def __init__(self, cluster: Cluster, count: int = LONG_WORDS) -> None:
        self._cluster = cluster
        self._messages = [{"role": "user", "content": words(count, next(self.numbers))}]
        self.usage: dict[str, Any] = {}

    def turn(self) -> str:
        """The next turn; returns the instance that answered."""
        body = {"model": SERVED_NAME, "messages": self._messages, "max_tokens": 4}
        answer = self._cluster.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        self.usage = document["usage"]
        said = document["choices"][0]["message"]["content"] or ""
        self._messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "and then?"},
        ]
        return answer.headers["x-hetero-gateway-instance"]


def seen(cluster: Cluster, name: str) -> dict[str, Any]:
    listed = cluster.http.get(f"{cluster.url}/admin/instances").json()["instances"]
    return next(row for row in listed if row["id"] == name)


@contextmanager
def draining(cluster: Cluster, name: str) -> Iterator[None]:
    """Nothing new goes there."""
    url = f"{cluster.url}/admin/instances/{name}"
    cluster.http.patch(url, json={"draining": True}).raise_for_status()
    try:
        yield
    finally:
        cluster.http.patch(url, json={"draining": False}).raise_for_status()


@contextmanager
def bound_to(cluster: Cluster, name: str) -> Iterator[None]:
    """A conversation that is long enough goes on there by itself; another one is made to."""
    if LONG:
        yield
    else:
        with draining(cluster, other(name)):
            yield


def other(name: str) -> str:
    return next(each for each in ALIASES if each != name)


@pytest.mark.parametrize("home", ALIASES)
def test_the_next_turn_goes_where_the_conversation_is(cluster, figure, home):
    """Also to the slow one, which has to compute a thirtieth of what the fast one had to."""
    tells = home in TELLS_CACHED
    talks = [Talk(cluster) for _ in range(2)]
    with draining(cluster, other(home)):
        assert {talk.turn() for talk in talks} == {home}
    before = seen(cluster, home)["cached_tokens"] or 0
    with bound_to(cluster, home):
        for _ in range(2):
            assert [talk.turn() for talk in talks] == [home] * 2
    cached = [
        (talk.usage.get("prompt_tokens_details") or {}).get("cached_tokens") for talk in talks
    ]
    assert all((tokens is not None) is tells for tokens in cached)
    if tells:  # whole blocks of 128, and never the last token
        whole = [talk.usage["prompt_tokens"] for talk in talks]
        least = 0.9 if LONG else 0.7
        assert min(a / b for a, b in zip(cached, whole, strict=True)) > least
    # The counters of the other are known at the next scrape.
    assert wait_until(lambda: (seen(cluster, home)["cached_tokens"] or 0) > before, PATIENCE_S)
    row = seen(cluster, home)
    assert row["prefix_trust"] > FULL_TRUST
    assert row["prefix_caching"] is True
    figure(
        f"{home} (by {'usage' if tells else 'counters'}): 4 of 4 next turns of "
        f"{talks[0].usage['prompt_tokens']} tokens went there, trust {row['prefix_trust']:.3f}, "
        f"cached share {row['cached_share']:.2f}"
    )


def test_a_restarted_engine_has_nothing(cluster: Cluster, figure: Figure) -> None:
    talk = Talk(cluster)
    with draining(cluster, "small"):
        assert talk.turn() == "large"
    with bound_to(cluster, "large"):
        assert talk.turn() == "large"
    bytes_before = seen(cluster, "large")["prefix_bytes"]
    assert bytes_before > 3 * LONG_WORDS
    cluster.engines["large"].kill()
    cluster.restore()
    assert wait_until(lambda: seen(cluster, "large")["prefix_bytes"] == 0, PATIENCE_S)
    assert seen(cluster, "large")["prefix_trust"] == 1.0
    assert talk.turn() == "small", "the slow one has no more of it than the fast one"
    figure(f"large restarted: its part of the index, {bytes_before} bytes, is dropped")


def test_an_engine_without_a_prefix_cache_is_not_trusted(cluster: Cluster, figure: Figure) -> None:
    fast = cluster.engines["small"]
    try:
        fast.restart("--no-enable-prefix-caching")
        fast.wait_ready()
        cluster.assert_up(small=True, large=True)
        assert wait_until(lambda: seen(cluster, "small")["prefix_caching"] is False, PATIENCE_S)
        # Both were sent it; only the slow one still has it.
        talk = Talk(cluster)
        with draining(cluster, "small"):
            assert talk.turn() == "large"
        with draining(cluster, "large"):
            assert talk.turn() == "small"
        with bound_to(cluster, "large"):
            assert [talk.turn() for _ in range(3)] == ["large"] * 3
        trust = {name: seen(cluster, name)["prefix_trust"] for name in ALIASES}
        assert trust["small"] == 0.0
        assert trust["large"] > FULL_TRUST
        figure(f"small without a prefix cache: trust {trust['small']:.2f}, follow-ups to large")
    finally:
        fast.restart()
        fast.wait_ready()
    cluster.assert_up(small=True, large=True)
    assert wait_until(lambda: seen(cluster, "small")["prefix_trust"] == 1.0, PATIENCE_S)


async def run_for(cluster: Cluster, name: str, seconds: float, *, cached: bool) -> dict[str, float]:
    """Streams on one instance; what its rows of observation say of them, and the mean of f."""
    shared = words(LONG_WORDS * 2 // 5, f"shared {time.time_ns()}")
    numbers = itertools.count()
    factors: list[float] = []
    give_up_s = time.monotonic() + seconds

    async def client(http: httpx.AsyncClient) -> None:
        while time.monotonic() < give_up_s:
            number = next(numbers)
            own = words(
                LONG_WORDS // 20 if cached else LONG_WORDS * 9 // 20, f"{number} {time.time_ns()}"
            )
            content = f"{shared} {own}" if cached else own
            body = {
                "model": ALIASES[name], "stream": True, "max_tokens": 60, "ignore_eos": True,
                "messages": [{"role": "user", "content": content}],
            }  # fmt: skip
            answer = await http.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text

    async def watch(http: httpx.AsyncClient) -> None:
        while time.monotonic() < give_up_s:
            await asyncio.sleep(1)
            listed = (await http.get("/admin/instances")).json()["instances"]
            factor = next(row["speed_factor"] for row in listed if row["id"] == name)
            factors.append(factor)

    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        url = f"/admin/observations?instance={name}"
        had = len((await http.get(url)).json()["steps"])
        await asyncio.gather(client(http), client(http), client(http), watch(http))
        await asyncio.sleep(3)  # the last counters are read
        document = (await http.get(url)).json()
    fields = document["step_fields"]
    rows = [dict(zip(fields, row, strict=True)) for row in document["steps"][had:]]
    known = [row for row in rows if row["hit_tokens"] is not None]
    prompts = sum(row["prompt_tokens"] for row in known)
    return {
        "rows": len(rows),
        "known": len(known) / len(rows),
        "hit_share": sum(row["hit_tokens"] for row in known) / prompts,
        "factor": statistics.mean(factors[len(factors) // 3 :]),
        "drifted": float(document["drift"]["drifted"]),
    }


@pytest.mark.parametrize("name", ALIASES)
async def test_cached_prompts_do_not_make_an_engine_look_faster(cluster, figure, name):
    await run_for(cluster, name, 3, cached=False)  # what is slow the first time
    plain = await run_for(cluster, name, 15, cached=False)
    cached = await run_for(cluster, name, 15, cached=True)
    for how, run in (("nothing cached", plain), ("cached", cached)):
        figure(
            f"{name}, {how}: hit share of its rows {run['hit_share']:.2f} ({run['known']:.0%} of "
            f"{run['rows']:.0f} rows known), speed factor {run['factor']:.2f}"
        )
    assert plain["hit_share"] < 0.05
    # Of a short prompt, whole blocks of 128 are less.
    assert (0.75 if LONG else 0.3) < cached["hit_share"] < 0.95
    assert min(plain["known"], cached["known"]) > 0.7
    # Were cached tokens counted as prefilled, it would be a half.
    assert cached["factor"] / plain["factor"] == pytest.approx(1, abs=0.3)
    assert not cached["drifted"] > plain["drifted"]
