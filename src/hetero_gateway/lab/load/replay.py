"""Replays timed requests against a target: one task per request in flight, one pacing loop."""

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Sequence

from hetero_gateway.engines.vllm import tokens_of_events
from hetero_gateway.files.trace import LoadRequest
from hetero_gateway.lab.load.client import LoadClient, LoadTarget, Reply, judge
from hetero_gateway.lab.load.conversations import Conversations
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind
from hetero_gateway.lab.load.result import RequestRecord


async def replay(
    target: LoadTarget,
    requests: Sequence[LoadRequest],
    maker: BodyMaker,
    on_record: Callable[[RequestRecord], None] = lambda _: None,
    *,
    concurrency: int | None = None,
    timeout_s: float = 600.0,
) -> list[RequestRecord]:
    """Send every request when it is due and return the records in order of sending.

    If all of them have texts, and chats are wanted, they are the trace's conversations: a turn
    that continues another is sent after that one's answer, or when it is due if that is later.

    Open loop: a slow server does not slow the sending, unless ``concurrency`` is reached; then
    requests are sent late, which the records show (``sent_s`` after ``due_s``).

    ``requests`` are sorted by ``due_s``; ``on_record`` is called with each record as it is
    made. ``concurrency``: most open requests, None for no bound; ``timeout_s``: per request.
    """
    raise_file_limit()
    client = LoadClient(target, maker.kind.path, stream=maker.stream, timeout_s=timeout_s)
    slots = asyncio.Semaphore(concurrency or max(1, len(requests)))
    records: list[RequestRecord] = []
    talks = None
    if maker.kind is PromptKind.CHAT and all(request.text is not None for request in requests):
        talks = Conversations(requests, maker.pool, maker.bytes_per_token)
    start_s = time.perf_counter()

    async def one(index: int, request: LoadRequest) -> None:
        reply = messages = None
        due_s = request.due_s
        try:
            if talks is not None:
                messages = await talks.messages(index)
                due_s = max(due_s, time.perf_counter() - start_s)
            body = maker.body(index, request.input_tokens, request.output_tokens, messages)
            wanted = talks is not None and talks.wants_text(index)
            reply = await client.post(body, Reply(0.0, parts=[] if wanted else None))
        finally:
            slots.release()
            if talks is not None:
                talks.finish(index, reply, stream=maker.stream)
        record = _record(index, request, reply, due_s, start_s, maker)
        records.append(record)
        on_record(record)

    async with contextlib.aclosing(client), asyncio.TaskGroup() as tasks:
        for index, request in enumerate(requests):
            wait_s = start_s + request.due_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await slots.acquire()
            tasks.create_task(one(index, request))
    return sorted(records, key=lambda record: record.index)


def _record(
    index: int, request: LoadRequest, reply: Reply, due_s: float, start_s: float, maker: BodyMaker
) -> RequestRecord:
    """A request's record; ``start_s``: the time that its times count from."""
    judged = judge(reply, stream=maker.stream)
    counted = tokens_of_events(maker.kind.path, reply.events)  # where there is no usage
    return RequestRecord(
        index=index,
        due_s=due_s,
        sent_s=reply.sent_s - start_s,
        first_s=None if reply.first_s is None else reply.first_s - start_s,
        end_s=reply.end_s - start_s,
        input_tokens=request.input_tokens if judged.prompt_tokens is None else judged.prompt_tokens,
        output_tokens=counted if judged.output_tokens is None else judged.output_tokens,
        instance=reply.instance,
        error=judged.error,
        streamed=maker.stream,
        cached_tokens=judged.cached_tokens if judged.error is None else None,
        said=judged.said,
    )


def raise_file_limit() -> None:
    """Every open request is a connection; the usual soft limit of 1 024 files is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then it stays unchanged
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
