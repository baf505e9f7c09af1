"""Traces: through the real gateway to a receiver of OTLP; and nothing of it where it is off."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.fakes.running import CHAT, chat, rig
from tests.fakes.threads import Handler, listening
from tests.fakes.vllm import FakeInstance

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
PROMPT = "the-secret-of-this-prompt"


class Receiver(Handler):
    spans: list[Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.answer(b"")


@contextlib.contextmanager
def receiver() -> Iterator[tuple[str, list[Any]]]:
    """Its endpoint, and the spans that have come."""
    handler = type("Handler", (Receiver,), {"spans": []})
    with listening(handler) as url:
        yield f"{url}/v1/traces", handler.spans


def attributes_of(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def traceparent_at(fake: FakeInstance) -> list[str]:
    """What its requests had."""
    lines = [line for head in fake.heads for line in head.decode().lower().split("\r\n")]
    return [line.split(": ", 1)[1] for line in lines if line.startswith("traceparent: ")]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_span_continues_its_clients_trace_into_the_instance(workers: int) -> None:
    with receiver() as (endpoint, spans):
        traces = {"endpoint": endpoint}
        async with rig(workers=workers, traces=traces) as (_, client, fakes):
            body = chat(PROMPT, stream=True, max_tokens=50, fake={"events": 4})
            headers = {"traceparent": TRACEPARENT, "x-request-id": "mine"}
            assert (await client.post(CHAT, json=body, headers=headers)).status_code == 200
        # What was there at the end was exported.
        (span,) = spans
    assert span.name == "chat m"
    assert span.trace_id.hex() == TRACE
    assert span.parent_span_id.hex() == PARENT
    assert traceparent_at(fakes[0]) == [f"00-{TRACE}-{span.span_id.hex()}-01"]
    found = attributes_of(span)
    wanted = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 50, "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 4, "http.response.status_code": 200,
        "http.request.method": "POST", "url.path": CHAT, "hetero_gateway.instance": "i0",
        "hetero_gateway.request_id": "mine", "hetero_gateway.outcome": "completed",
    }  # fmt: skip
    assert wanted.items() <= found.items()
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    lasted_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert lasted_s == pytest.approx(found["gen_ai.latency.e2e"], abs=1e-4)
    assert [event.name for event in span.events] == ["first_token"]
    assert PROMPT not in str(span)


async def test_what_fails_and_what_is_never_sent_have_spans_too() -> None:
    with receiver() as (endpoint, spans):
        async with rig(traces={"endpoint": endpoint}) as (_, client, _):
            await client.post(CHAT, json={"model": PROMPT, "messages": []})
            breaks = chat(PROMPT, stream=True, fake={"events": 9, "die": "after_events"})
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post(CHAT, json=breaks)
        outcomes = {attributes_of(span)["hetero_gateway.outcome"] for span in spans}
        assert outcomes == {"rejected", "upstream_error"}
    (failed,) = (span for span in spans if "error.type" in attributes_of(span))
    assert attributes_of(failed)["error.type"] == "reset"
    assert failed.status.code == 2
    # Traces of their own, as no client had begun one.
    assert len({span.trace_id for span in spans}) == 2
    assert not any(span.parent_span_id for span in spans)
    assert PROMPT not in str(spans)


async def test_a_client_that_does_not_trace_is_followed_in_that() -> None:
    with receiver() as (endpoint, spans):
        async with rig(traces={"endpoint": endpoint}) as (_, client, fakes):
            headers = {"traceparent": TRACEPARENT[:-2] + "00"}
            await client.post(CHAT, json=chat(PROMPT), headers=headers)
    assert spans == []
    (sent,) = traceparent_at(fakes[0])
    assert sent.startswith(f"00-{TRACE}-")
    assert sent.endswith("-00")


async def test_switched_off_the_header_passes_as_it_came() -> None:
    async with rig() as (running, client, fakes):
        assert running.gateway.dataplane.rooms.tracing is None
        await client.post(CHAT, json=chat(PROMPT), headers={"traceparent": TRACEPARENT})
        assert traceparent_at(fakes[0]) == [TRACEPARENT]


async def test_a_collector_that_does_not_answer_holds_nothing_up() -> None:
    traces = {"endpoint": "http://127.0.0.1:9/v1/traces"}
    async with asyncio.timeout(60), rig(traces=traces) as (_, client, _):
        assert (await client.post(CHAT, json=chat(PROMPT))).status_code == 200


def test_switched_off_nothing_of_it_is_imported(tmp_path: Path) -> None:
    # A framework may import OpenTelemetry's bare interface; what does something is ours alone.
    script = (
        "import sys; import hetero_gateway.serve.app, hetero_gateway.serve.processes.worker;"
        "print([name for name in sys.modules"
        " if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"
