"""A real browser, headless, for what a person sees."""

import asyncio
import base64
import contextlib
import os
import re
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

CHROMIUM = "/usr/bin/chromium"
_TRIES = 3
FLAGS = [
    *("--headless", "--no-sandbox", "--no-first-run"),
    *(f"--disable-{part}" for part in ("gpu", "background-networking", "component-update", "sync")),
]


class Browser:
    """Headless Chromium, driven over WebDriver."""

    def __init__(self, client: httpx.AsyncClient, profile: Path) -> None:
        self._client = client
        self._profile = profile
        self._session = ""

    async def open(self) -> None:
        options = {"args": [*FLAGS, f"--user-data-dir={self._profile}"], "binary": CHROMIUM}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = await self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"

    async def close(self) -> None:
        if self._session:
            await self._call("DELETE", self._session, None)

    async def visit(self, url: str) -> None:
        await self._call("POST", f"{self._session}/url", {"url": url})

    async def run(self, script: str, *arguments: object) -> Any:
        body = {"script": script, "args": arguments}
        return await self._call("POST", f"{self._session}/execute/sync", body)

    async def text(self, selector: str) -> str:
        """The visible text of the first match, or "" where there is none."""
        script = "return document.querySelector(arguments[0])?.innerText ?? ''"
        return str(await self.run(script, selector))

    async def until(
        self, selector: str, holds: Callable[[str], bool], within_s: float = 60.0
    ) -> str:
        """Wait until an element's text is as wanted; fails showing what it was."""
        text = ""
        try:
            async with asyncio.timeout(within_s):
                # A page in another process has no event to wait on.
                while not holds(text := await self.text(selector)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            page = await self.text("body")
            pytest.fail(f"{selector} stayed {text!r}; the page:\n{page}")
        return text

    async def complaints(self) -> list[str]:
        """What the page logged: errors and policy violations among it; taken once."""
        entries = await self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    async def devtools(self, command: str, **parameters: object) -> Any:
        body = {"cmd": command, "params": parameters}
        return await self._call("POST", f"{self._session}/goog/cdp/execute", body)

    async def picture(self, name: str) -> None:
        """A PNG in the folder that SCREENSHOTS names, if it does."""
        if folder := os.environ.get("SCREENSHOTS"):
            shot = await self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
            file = Path(folder) / f"{name}.png"
            await asyncio.to_thread(file.write_bytes, base64.b64decode(shot["data"]))

    async def _call(self, method: str, path: str, body: object) -> Any:
        response = await self._client.request(method, path, json=body)
        value = response.json()["value"]
        assert response.is_success, value
        return value


@contextlib.asynccontextmanager
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    """A fresh browser; it and its driver end with the block."""
    driver, port = await asyncio.to_thread(_start_driver)
    assert driver.stdout is not None
    drain = threading.Thread(target=driver.stdout.read, daemon=True)
    drain.start()
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
        ) as client:
            opened = Browser(client, tmp_path / "profile")
            try:
                await opened.open()
                yield opened
            finally:
                await opened.close()
    finally:
        driver.terminate()
        await asyncio.to_thread(driver.wait)
        drain.join()
        driver.stdout.close()


def _start_driver() -> tuple[subprocess.Popen[str], int]:
    """The driver, and its port; it is tried again where another process was given that port."""
    for _ in range(_TRIES):
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert driver.stdout is not None
        for line in driver.stdout:
            if match := re.search(r"started successfully on port (\d+)", line):
                return driver, int(match.group(1))
        driver.wait()
        driver.stdout.close()
    raise RuntimeError("chromedriver did not start")
