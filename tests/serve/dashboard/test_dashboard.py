"""The live page: how it is served, and, in a real browser, what a person sees."""

import asyncio
import json
import logging
import re
from pathlib import Path

import pytest

from hetero_gateway.core.types import InstanceId
from tests.fakes.browser import browser
from tests.fakes.running import CHAT, FAST, SLOW, chat, config_for, eventually, rig, running_gateway
from tests.fakes.vllm import FakeInstance, fake_instances

OPEN_ALL = "for (const panel of document.querySelectorAll('details.panel')) panel.open = true"
OPEN_ROWS = "for (const more of document.querySelectorAll('.row .more')) more.click()"
EVIL = "<img src=x onerror=alert(1)>"
ADMIN_KEY = "admin-secret-31415"


# As served


async def test_the_page_and_its_files_are_served_under_a_strict_policy() -> None:
    async with rig() as (_, client, _):
        page = await client.get("/dashboard")
        addresses = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        files = [await client.get(f"/{address}") for address in addresses]
        assert (await client.get("/dashboard/admin.py")).status_code == 404
        assert (await client.get("/dashboard/..%2fadmin.py")).status_code == 404
        parts = ("dashboard.js", "figures.js", "instances.js", "requests.js")
        script = "".join([(await client.get(f"/dashboard/{name}")).text for name in parts])
        style = (await client.get("/dashboard/dashboard.css")).text
    assert page.headers["content-type"].startswith("text/html")
    assert {a.rsplit(".")[-1] for a in addresses} == {"css", "js", "svg"}
    for answer in (page, *files):
        assert answer.status_code == 200
        policy = dict(
            part.strip().split(" ", 1)
            for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    imported = set(re.findall(r'from "\./([^"]+)"', script))
    assert imported == {"figures.js", "instances.js", "requests.js"}
    # The page needs nothing from elsewhere, and builds no markup from strings.
    assert not re.search(r"<style|<script(?![^>]*src=)|\son\w+=|\sstyle=", page.text)
    assert not re.search(r"(?:src|href)=\"(?:\w+:|//)", page.text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    assert not re.search(r"@import|url\(", style)
    assert "localStorage" not in script


# In a browser


@pytest.mark.system
async def test_the_page_shows_instances_decisions_and_their_reason(tmp_path: Path) -> None:
    instances = [FakeInstance(("m", EVIL)) for _ in range(3)]
    batches = {"directory": str(tmp_path / "batches")}
    async with rig(instances, profiles=(FAST, SLOW, None), batches=batches) as (
        running,
        client,
        fakes,
    ):
        async with browser(tmp_path) as page:
            await fakes[2].kill()
            await eventually(lambda: not list(running.gateway.fleet.instances.values())[2].up)
            await client.patch("/admin/instances/i1", json={"draining": True})
            await page.devtools(
                "Emulation.setDeviceMetricsOverride",
                width=1280, height=900, deviceScaleFactor=1, mobile=False,
            )  # fmt: skip
            await page.visit(running.dashboard)
            await page.until("#summary", lambda text: "1 of 3" in text)
            assert "i2 is down" in await page.text("#alarms")
            await page.run(OPEN_ALL)
            await client.patch("/admin/instances/i1", json={"draining": False})
            answers = [
                asyncio.create_task(
                    client.post(CHAT, json=chat(model=model, fake={"first_delay_s": 4}))
                )
                for model in ("m", "m", "m", "m", EVIL)
            ]
            await page.until("#instances", lambda text: "draining" not in text)
            # What is down comes first.
            rows = await page.until("#instances", lambda text: "down" in text)
            assert rows.index("i2") < rows.index("i0")
            assert "Connection refused" in rows
            assert "profile drifted" not in rows
            await page.run(OPEN_ROWS)
            rows = await page.text("#instances")
            assert FAST in rows
            assert "unprofiled, by its observed speed" in rows
            await page.until("#summary", lambda text: "In flight\n5" in text)
            widths = await page.run(
                "return [...document.querySelectorAll('.workload i')].map(e => e.style.width)"
            )
            assert max(float(width.rstrip("%")) for width in widths) == 100
            assert float(widths[0].rstrip("%")) == 0

            drift = running.gateway.fleet.scheduler.members.drifts.get(InstanceId("i0"))
            assert drift is not None
            drift.drifted = True
            await page.until("#instances", lambda text: text.count("profile drifted") == 1)

            # A request that is over beside its prediction, and its page.
            await page.until("#last", lambda text: text.count("ok") == 5)
            await page.run("document.querySelector('#last a').click()")
            story = await page.until("#request-page", lambda text: "chosen" in text)
            assert "PREDICTED" in story.upper()
            assert "left out: unhealthy" in story
            assert "i0" in story
            assert "i1" in story
            await page.run("location.hash = ''")
            await page.until("#instances", lambda text: "i0" in text)

            await page.run(
                "document.getElementById('model').value = arguments[0];"
                "document.getElementById('explain').requestSubmit()",
                EVIL,
            )
            explained = await page.until("#explained", lambda text: "would get it:" in text)
            assert EVIL in explained

            # Names stayed text: nothing was built from them, nothing ran, nothing was blocked.
            assert await page.run("return document.querySelectorAll('img[src=\"x\"]').length") == 0
            assert EVIL in await page.text("#instances")
            assert await page.complaints() == []

            # A batch, and where it is.
            lines = [
                {"custom_id": name, "url": CHAT, "body": chat(fake={"first_delay_s": 4})}
                for name in (EVIL, "b", "c")
            ]
            text = "\n".join(map(json.dumps, lines))
            up = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": text})
            begun = {"input_file_id": up.json()["id"]}
            batch_id = (await client.post("/v1/batches", json=begun)).json()["id"]
            row = await page.until("#batches", lambda text: "i1: " in text or "i0: " in text)
            assert batch_id in row
            assert "0 of 3" in row

            # Found by its id; drained, which asks first, weighed and resumed from the page.
            name = (await client.get("/admin/decisions?limit=1")).json()["decisions"][0]
            await page.run(
                "document.getElementById('request-id').value = arguments[0];"
                "document.getElementById('find').requestSubmit()",
                name["request_id"],
            )
            await page.until("#request-name", lambda text: text == name["request_id"])
            await page.until("#request-parts", lambda text: "got it:" in text)
            await page.run("location.hash = ''")
            rows = "[...document.querySelectorAll('#instances .row')]"
            first = f"{rows}.find(e => /^i0/.test(e.innerText))"
            drain = f"{first}.querySelector('.actions button[type=button]').click()"
            await page.run(drain)
            await page.until("#instances", lambda text: "Drain all the same" in text)
            assert not running.gateway.fleet.instances[InstanceId("i0")].draining
            await page.run(drain)
            await page.until("#instances", lambda text: "Resume" in text)
            assert running.gateway.fleet.instances[InstanceId("i0")].draining
            await page.run(drain)
            await page.run(
                f"const row = {first}; row.querySelector('.actions input').value = 2.5;"
                "row.querySelector('.actions').requestSubmit()"
            )
            await page.until("#instances", lambda text: "weight 2.50" in text)
            assert not running.gateway.fleet.instances[InstanceId("i0")].draining

            await page.run("document.getElementById('pause').click()")
            for scheme in ("light", "dark"):
                feature = {"name": "prefers-color-scheme", "value": scheme}
                await page.devtools("Emulation.setEmulatedMedia", features=[feature])
                await page.picture(f"wide-{scheme}")
            await page.devtools(
                "Emulation.setDeviceMetricsOverride",
                width=360, height=800, deviceScaleFactor=1, mobile=True,
            )  # fmt: skip
            sizes = await page.run("return [document.documentElement.scrollWidth, innerWidth]")
            assert sizes == [360, 360]
            await page.picture("phone-dark")
            await asyncio.gather(*answers)


@pytest.mark.system
async def test_the_key_is_asked_for_and_never_in_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_ADMIN_KEY", ADMIN_KEY)
    enter = (
        "document.getElementById('key').value = arguments[0];"
        "document.getElementById('key-form').requestSubmit()"
    )
    async with fake_instances(1) as fakes:
        config = config_for(fakes, server={"admin_key_env": "TEST_ADMIN_KEY"})
        async with running_gateway(config) as running, browser(tmp_path) as page:
            await page.visit(f"{running.url}/dashboard")
            await page.until("#key-form", lambda text: "Admin key" in text)
            await page.picture("key")
            await page.run(enter, "wrong")
            await page.until("#key-problem", lambda text: "refused" in text)
            await page.run(enter, ADMIN_KEY)
            await page.until("#instances", lambda text: "i0" in text)
            assert await page.run("return location.href") == f"{running.url}/dashboard"
            assert await page.run("return [localStorage.length, document.cookie]") == [0, ""]
            assert ADMIN_KEY not in await page.run("return document.documentElement.outerHTML")
            await page.run("document.getElementById('forget').click()")
            await page.until("#key-form", lambda text: "Admin key" in text)
            assert await page.run("return sessionStorage.length") == 0


@pytest.mark.system
async def test_the_link_that_serve_prints_lets_in_and_its_key_leaves_the_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        key = running.gateway.made_admin_key
        assert key is not None
        async with browser(tmp_path) as page:
            await page.visit(f"{running.url}/dashboard")
            asked = await page.until("#key-form", lambda text: "Admin key" in text)
            assert "hetero-gateway key admin" in asked
            await page.picture("no-key")
            # In the same tab: only what stands behind "#" changes.
            await page.visit(f"{running.url}/dashboard#key=wrong")
            await page.until("#key-problem", lambda text: "refused" in text)
            await page.visit(running.dashboard)
            await page.until("#instances", lambda text: "i0" in text)
            assert await page.run("return location.href") == f"{running.url}/dashboard"
            await page.picture("let-in")
            # Not in what stays: a reload of the tab has it, another tab and the history have not.
            await page.run("location.reload()")
            await page.until("#live", lambda text: text == "live")
            assert await page.run("return location.href") == f"{running.url}/dashboard"
            assert await page.run("return [localStorage.length, document.cookie]") == [0, ""]
            assert key not in await page.run("return document.documentElement.outerHTML")
        # In a tab of its own.
        async with browser(tmp_path / "another") as page:
            await page.visit(running.dashboard)
            await page.until("#instances", lambda text: "i0" in text)
            assert await page.run("return location.href") == f"{running.url}/dashboard"
    assert key not in caplog.text


@pytest.mark.system
async def test_a_closed_api_and_a_silent_gateway_are_told(tmp_path: Path) -> None:
    async with fake_instances(1) as fakes, browser(tmp_path) as page:
        async with running_gateway(config_for(fakes, server={"host": "0.0.0.0"})) as running:
            await page.visit(f"http://127.0.0.1:{running.port}/dashboard")
            closed = await page.until("#off", lambda text: "admin_key_env" in text)
            assert "listen on loopback" in closed
            await page.picture("closed")
        async with running_gateway(config_for(fakes)) as running:
            await page.visit(running.dashboard)
            await page.until("#live", lambda text: text == "live")
        silent = await page.until("#banner", lambda text: "does not answer" in text)
        assert "What you see is from" in silent
        assert "i0" in await page.text("#instances")
        await page.picture("silent")


@pytest.mark.system
async def test_a_hidden_page_asks_nothing_and_none_builds_markup(tmp_path: Path) -> None:
    hide = (
        "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
        "window.asked = 0; const ask = window.ask ||= window.fetch;"
        "window.fetch = (...all) => { window.asked += 1; return ask(...all); };"
        "document.dispatchEvent(new Event('visibilitychange'));"
    )
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with browser(tmp_path) as page:
            await page.visit(running.dashboard)
            await page.until("#live", lambda text: text == "live")
            refused = await page.run(
                "try { document.body.innerHTML = arguments[0]; return '' }"
                "catch (error) { return String(error) }",
                EVIL,
            )
            assert "TrustedHTML" in refused
            await page.run(hide, True)
            await asyncio.sleep(2.5)
            assert await page.run("return window.asked") == 0
            await page.run(hide, False)
            async with asyncio.timeout(60):
                while await page.run("return window.asked") < 1:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
