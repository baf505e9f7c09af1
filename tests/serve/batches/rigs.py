"""A gateway with batches over fakes, and a client of it that is OpenAI's."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import openai

from hetero_gateway.serve.batches.runner import Runner
from tests.fakes.running import CHAT, Rig, chat, eventually, rig
from tests.fakes.vllm import FakeInstance

Line = dict[str, Any]


class BatchRig(NamedTuple):
    rig: Rig
    openai: openai.AsyncOpenAI

    @property
    def runner(self) -> Runner:
        batches = self.rig.running.gateway.batches
        assert batches is not None
        assert batches.runner is not None
        return batches.runner

    async def upload(self, lines: Iterable[Line]) -> str:
        file = await self.openai.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        return file.id

    async def start(self, lines: Iterable[Line], endpoint: str = CHAT, window: str = "24h") -> Any:
        return await self.openai.batches.create(
            input_file_id=await self.upload(lines),
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window=window,  # type: ignore[arg-type]
        )

    async def ended(self, batch_id: str) -> Any:
        """The batch, once it is over."""
        async with asyncio.timeout(120):
            while True:
                batch = await self.openai.batches.retrieve(batch_id)
                if batch.status in ("completed", "failed", "expired", "cancelled"):
                    return batch
                await asyncio.sleep(0.5)

    async def lines_of(self, file_id: str | None) -> list[Line]:
        if file_id is None:
            return []
        content = await self.openai.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]


def jsonl(lines: Iterable[Line]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def line(number: int, text: str = "", url: str = CHAT, **body: Any) -> Line:
    content = chat(text or f"question {number}", **{"max_tokens": 16, **body})
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": content}


@contextlib.asynccontextmanager
async def batch_rig(
    directory: Path, fakes: int | list[FakeInstance] = 2, key: str = "none", **sections: Any
) -> AsyncIterator[BatchRig]:
    batches = {"directory": str(directory)} | sections.pop("batches", {})
    async with rig(fakes, batches=batches, **sections) as there:
        await eventually(lambda: "m" in there.running.gateway.fleet.models())
        async with openai.AsyncOpenAI(
            base_url=f"{there.client.base_url}/v1", api_key=key, max_retries=0
        ) as client:
            yield BatchRig(there, client)
