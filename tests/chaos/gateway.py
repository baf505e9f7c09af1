"""A real ``hetero-gateway serve`` in a process of its own, seen from outside."""

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from hetero_gateway.files.admin_key import find
from hetero_gateway.lab.load.admin import bearer

_READY_WITHIN_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# What no run may leave in a log: an exception that nobody caught, or asyncio's own complaints.
_ALARMING = re.compile(
    r"Traceback|was never retrieved|never awaited|Exception in callback|Task was destroyed"
    r"|unhandled|Fatal"
)


class Process:
    """What /proc shows of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._proc = Path(f"/proc/{pid}")

    @property
    def rss_bytes(self) -> int:
        return int((self._proc / "statm").read_text().split()[1]) * _PAGE_BYTES

    @property
    def cpu_s(self) -> float:
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    @property
    def descriptors(self) -> int:
        return len(os.listdir(self._proc / "fd"))

    @property
    def threads(self) -> int:
        return len(os.listdir(self._proc / "task"))


class GatewayProcess(Process):
    """One gateway; use ``start``."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        super().__init__(process.pid)
        self.process = process
        self.url = url
        self.port = int(url.rsplit(":", 1)[1])
        self.log = log
        made = find(url)
        headers = {} if made is None else bearer(made.key)
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=30.0, trust_env=False
        )

    @classmethod
    async def start(cls, config: Path, log: Path, workers: int = 1, *more: str) -> "GatewayProcess":
        """Serve on a free port, or as ``more`` says. Raises RuntimeError: it does not come up."""
        process, url = await asyncio.to_thread(_start, config, log, workers, *more)
        return cls(process, url, log)

    async def get(self, path: str) -> Any:
        """A JSON page."""
        answer = await self._client.get(path, headers={"connection": "close"})
        answer.raise_for_status()
        return answer.json()

    async def reload(self) -> tuple[int, str]:
        """(status, body) of /admin/reload."""
        answer = await self._client.post("/admin/reload", headers={"connection": "close"})
        return answer.status_code, answer.text

    async def metrics(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Values by sample name and labels."""
        answer = await self._client.get("/metrics", headers={"connection": "close"})
        answer.raise_for_status()
        values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                values.setdefault(sample.name, {})[labels] = sample.value
        return values

    async def left_over(self) -> list[str]:
        """Loads, counts and waiting requests that are not 0."""
        page = await self.get("/admin/instances")
        found = [
            f"{row['id']}: {key} is {row[key]!r}"
            for row in page["instances"]
            for key in ("in_flight", "workload", "kv_tokens", "waiting_first_token")
            if row[key]
        ]
        depth = (await self.metrics())["hetero_gateway_queue_depth"][()]
        return found + ([f"{depth:g} requests are queued"] if depth else [])

    def alarms(self) -> list[str]:
        """Lines of the log that must not be there."""
        lines = self.log.read_text("utf-8", "replace").splitlines()
        found = []
        for number, line in enumerate(lines):
            if _ALARMING.search(line):
                # With a traceback's last lines: where it was, and what.
                end = number + 1
                while end < len(lines) and lines[end].startswith(" "):
                    end += 1
                found.append(" | ".join([line[:300], *lines[max(number + 1, end - 4) : end + 1]]))
        return found

    def terminate(self) -> None:
        self.process.terminate()

    async def wait(self, within_s: float) -> int | None:
        """Its exit code; None when it is still there."""
        try:
            return await asyncio.to_thread(self.process.wait, within_s)
        except subprocess.TimeoutExpired:
            return None

    async def aclose(self) -> None:
        await self._client.aclose()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _start(
    config: Path, log: Path, workers: int, *more: str
) -> tuple[subprocess.Popen[bytes], str]:
    """(the process, its URL)."""
    command = [sys.executable, "-m", "hetero_gateway", "serve", "-c", str(config), "--port", "0"]
    command += ["--workers", str(workers), *more]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL)
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < deadline_s and process.poll() is None:
        match = re.search(r"serving on (http://[\d.]+:\d+)", log.read_text("utf-8", "replace"))
        if match:
            return process, match[1]
        time.sleep(0.05)
    process.kill()
    process.wait()
    raise RuntimeError(f"the gateway did not come up: {log.read_text('utf-8', 'replace')[-500:]}")
