"""/admin/requests: what finished, as a trace that our own tools read."""

import asyncio

from hetero_gateway.files.trace import TraceRequest, parse_trace
from hetero_gateway.gateway.records.history import (
    MAX_REQUESTS,
    FinishedRequest,
    RequestHistory,
    as_trace,
)
from tests.fakes.running import CHAT, chat, rig


def finished(arrival_s: float, model: str = "m", limit: int | None = None) -> FinishedRequest:
    return FinishedRequest(arrival_s, model, 10, 20, limit, 1)


async def test_finished_requests_are_a_trace_without_prompts_or_ids() -> None:
    async with rig() as (_, client, _):
        headers = {"x-request-id": "id-of-a-person"}
        usage = (await client.post(CHAT, json=chat("a secret"), headers=headers)).json()["usage"]
        await asyncio.sleep(0.1)
        await client.post(CHAT, json=chat("a secret", max_tokens=5))
        await client.post("/v1/embeddings", json={"model": "m", "input": "x"})
        await client.post(CHAT, json=chat("a secret", fake={"die": "before_head"}))
        await client.post(CHAT, json=chat("a secret", fake={"status": 400}))
        response = await client.get("/admin/requests")
        assert response.headers["content-type"].startswith("text/csv")
        assert "secret" not in response.text
        assert "id-of" not in response.text
        rows = parse_trace(response.text, "gateway")
        assert [row.max_tokens for row in rows] == [None, 5]
        first = rows[0]
        assert (first.arrival_s, first.model) == (0.0, "m")
        assert first.input_tokens == usage["prompt_tokens"]
        assert first.output_tokens == usage["completion_tokens"]
        assert rows[1].arrival_s is not None
        assert rows[1].arrival_s > 0


def test_rows_come_in_order_of_arrival_whatever_finished_first() -> None:
    rows = parse_trace(as_trace([finished(7.5), finished(5.0, limit=9)], 1e9), "x")
    assert rows == [
        TraceRequest(0.0, 10, 20, "m", 9),
        TraceRequest(2.5, 10, 20, "m", None),
    ]
    assert as_trace([finished(5.0)], 1e9).splitlines()[1].endswith(",1000000005.000")


def test_a_models_name_is_quoted_whatever_is_in_it() -> None:
    name = 'a,"b"\u2028\nc'
    (row,) = parse_trace(as_trace([finished(1.0, model=name)], 0.0), "x")
    assert row.model == name


def test_an_empty_history_has_the_header_alone() -> None:
    assert as_trace([], 0.0).count("\n") == 1


def test_the_history_gives_back_what_was_put_in() -> None:
    history = RequestHistory()
    put_in = [
        finished(0.25),
        finished(1.5, model="another", limit=9),
        FinishedRequest(1e9 + 0.125, "m", 2**40, 1, 2**50, 16),
    ]
    history.extend(put_in)
    assert list(history) == put_in
    assert len(history) == 3


def test_the_history_is_bounded() -> None:
    history = RequestHistory()
    for i in range(MAX_REQUESTS + 5):
        history.extend([finished(float(i), model=f"m{i}")])
    rows = list(history)
    assert len(history) == len(rows) == MAX_REQUESTS
    assert [(row.arrival_s, row.model) for row in rows[:2]] == [(5.0, "m5"), (6.0, "m6")]
    assert (rows[-1].arrival_s, rows[-1].model) == (MAX_REQUESTS + 4, f"m{MAX_REQUESTS + 4}")
    assert as_trace(rows, 0.0).count("\n") == MAX_REQUESTS + 1
