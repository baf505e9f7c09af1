"""The first screen at 1280 x 800: an operator's five questions without scrolling or clicking."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.client_keys import hash_of
from tests.fakes.browser import Browser, browser
from tests.fakes.running import CHAT, FAST, SLOW, RunningGateway, chat, config_for, running_gateway
from tests.fakes.vllm import FakeInstance, fake_instances

_log = logging.getLogger(__name__)

KEYS = {name: f"key-of-{name}-0123456789abcdef0123" for name in ("chat", "search", "batch-jobs")}
# By FAST's profile: a step, and a short prefill.
STEP_S, PREFILL_S = 0.0105, 0.018
# Longer where pictures are taken: lines have something to show.
TRAFFIC_S = float(os.environ.get("SCREENSHOT_S", "3"))
# Of what is to be seen at once: a selector, and how many there are at least.
SEEN = {
    "#summary dd": 2, ".tile .now": 6, ".spark svg": 6, "#waits .waitbar": 1, "#retries": 1,
    "#clients tr": 3, "#last tr": 5, "#instances .row": 2,
}  # fmt: skip
TEXTS = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
VISIBLE = """
const seen = (e) => {
  const box = e.getBoundingClientRect();
  const at = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
  return box.width > 0 && box.height > 0 && box.left >= 0 && box.top >= 0 &&
    box.right <= innerWidth && box.bottom <= innerHeight && (e.contains(at) || at?.contains(e));
};
return [...document.querySelectorAll(arguments[0])].filter(seen).map((e) => e.innerText);
"""


async def traffic(client: httpx.AsyncClient, seconds: float, per_s: float) -> None:
    """Streams of three clients."""
    names = [*KEYS, "chat"]

    async def one(number: int) -> None:
        fake = {"delay_s": STEP_S, "events": 16, "first_delay_s": PREFILL_S}
        headers = {"authorization": f"Bearer {KEYS[names[number % len(names)]]}"}
        body = chat("x" * 400 + str(number), stream=True, fake=fake)
        await client.post(CHAT, json=body, headers=headers)

    async with asyncio.TaskGroup() as tasks:
        for number in range(round(seconds * per_s)):
            tasks.create_task(one(number))
            await asyncio.sleep(1 / per_s)


def make_slow(running: RunningGateway, instance_id: str | None) -> None:
    """It alone is slow, as if five seconds of it had been seen: the test does not wait for them."""
    for each in running.gateway.fleet.scheduler.members.slowness.values():
        each.since_s = None  # where this machine is busy, so are the others
    if instance_id is None:
        return
    slowness = running.gateway.fleet.scheduler.members.slowness[InstanceId(instance_id)]
    for second in range(6):
        slowness.look(1.0, 0.25, float(second))


def figure(text: str) -> float:
    """Of a per cent, as it is shown."""
    return float(text.removesuffix(" %").replace("–", "0"))


def check_sum(shown: list[float]) -> None:
    """Parts of a whole, each with the two digits that count that are shown of it."""
    rounding = sum(0.5 if share >= 10 else 0.05 for share in shown)
    assert sum(shown) == pytest.approx(100, abs=rounding + 1)


async def check(page: Browser, count: int, wrong: list[str]) -> None:
    """What is to be seen is seen, and sums are right."""
    for selector, least in SEEN.items():
        found = await page.run(VISIBLE, selector)
        assert len(found) >= least, (selector, found)
    rows: list[str] = await page.run(VISIBLE, "#instances .row")
    assert [row.split()[0] for row in rows[: len(wrong)]] == wrong
    assert len(rows) >= min(count, 12)
    alarms = "\n".join(await page.run(VISIBLE, "#alarms li"))
    for name in wrong:
        assert name in alarms
    figures: list[str] = await page.run(TEXTS, "#instances .queue .value")
    summary = (await page.text("#summary")).split()
    assert sum(int(each) for each in figures) == int(summary[-1])
    resting = sum("ejected" in row or "down" in row for row in rows[:3])
    assert f"{count - resting} of {count}" in " ".join(summary)
    of_capacity: list[str] = await page.run(TEXTS, "#instances .share .value")
    for place in (0, 1):  # of traffic, of capacity
        check_sum([figure(text.split(" of ")[place]) for text in of_capacity])
    clients: list[str] = await page.run(VISIBLE, "#clients td:nth-child(4)")
    check_sum([figure(text) for text in clients])
    waits = await page.text("#waits-title")
    parts = await page.run(
        "return [...document.querySelectorAll('#waits .waitbar i')].map((e) => e.style.width)"
    )
    assert sum(float(part.rstrip("%")) for part in parts) == pytest.approx(100, abs=2)
    assert "streams" in waits


async def look(
    page: Browser, fakes: list[FakeInstance], count: int, sections: dict[str, Any]
) -> None:
    """So many instances, one down, one that fails and one that is slow where there are eight."""
    wrong = [] if count == 2 else ["i2", "i5", "i6"]
    there = fakes[:2] if count == 2 else [*fakes, *([fakes[0]] * (count - 8))]
    config = config_for(there, profiles=(FAST, FAST, SLOW, FAST), **sections)
    async with (
        running_gateway(config) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60) as client,
    ):
        if count == 8:
            await fakes[2].kill()
            fakes[5].fault = {"status": 500}
            fakes[6].fault = {"delay_s": 4 * STEP_S, "first_delay_s": 4 * PREFILL_S}
        await traffic(client, TRAFFIC_S, 6 * min(count, 2))
        make_slow(running, "i6" if wrong else None)
        if wrong:  # so few may not have come there
            running.gateway.metrics.upstream_errors["i5", "server_error"] += 3
        await page.visit(running.dashboard)
        await page.until(".tile .now", lambda text: text != "0")
        await page.until("#last", lambda text: text.count("ok") >= 5)
        await page.until("#alarms", lambda text: all(name in text for name in wrong))
        await page.run("document.getElementById('pause').click()")
        await page.picture(f"first-{count}")
        await check(page, count, wrong)
        took_ms = await page.run("return performance.getEntriesByName('board')[0].startTime")
        _log.info("%d instances: shown %.0f ms after the page was asked for", count, took_ms)
        assert await page.complaints() == []


@pytest.mark.system
async def test_five_questions_are_answered_at_once_with_2_to_200_instances(tmp_path: Path) -> None:
    keys = [{"name": name, "hash": hash_of(key)} for name, key in KEYS.items()]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}), "utf-8")
    sections: dict[str, Any] = {
        "clients": {"keys_file": str(tmp_path / "keys.yaml")},
        "scheduler": {"policy": "least-requests"},
        "health": {"probe_interval_s": 2, "probe_timeout_s": 30, "scrape_interval_s": 5},
    }
    async with fake_instances(8) as fakes, browser(tmp_path) as page:
        await page.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=1280, height=800, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        for count in (2, 8, 64, 200):
            await look(page, fakes, count, sections)
