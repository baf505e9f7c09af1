"""What needs a clock and a connection: times, queues, disconnects, overload, shutdown."""

import contextlib
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from hetero_gateway.core.costs.cost_model import decode_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.emulated import emulated
from tests.lab.emulator.conftest import profile

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV = "vllm:kv_cache_usage_perc"
LONG = {"prompt": [1] * 200, "max_tokens": 6000, "ignore_eos": True}


def send(instance, body, path="/v1/completions"):
    """A raw connection with one request on it."""
    data = json.dumps(body).encode()
    host, port = instance.base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data)
    )
    return connection


def rest_of(connection) -> bytes:
    """What comes until the other side closes it."""
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


async def test_ttft_and_tpot_of_a_solo_request_are_those_of_the_profile():
    c = Constants(p1=1e-3, p2=0.01, p3=0, p4=0.05, p5=1e-6, p6=1e-3, p7=0, p8=0.02)
    prompt, output = 100, 11
    ttft_s, decode_s = prefill_time_s(c, 1, prompt), decode_time_s(c, 1, prompt, output - 1)
    assert ttft_s == pytest.approx(0.16)
    asked = {"prompt": [7] * prompt, "max_tokens": output, "ignore_eos": True, "stream": True}
    async with emulated(EmulatorSettings(profile(c))) as (url, _), httpx.AsyncClient() as client:
        started_s = time.perf_counter()
        async with client.stream("POST", f"{url}/v1/completions", json=asked) as response:
            times = [time.perf_counter() async for line in response.aiter_lines() if "text" in line]
        text = (await client.get(f"{url}/metrics")).text
    assert len(times) == output
    assert times[0] - started_s == pytest.approx(ttft_s, abs=0.001)
    assert times[-1] - times[0] == pytest.approx(decode_s, abs=0.001)
    # What the engine planned, without any clock: exactly Eq. (4).
    (planned_s,) = re.findall(r"^vllm:inter_token_latency_seconds_sum{.*} (\S+)$", text, re.M)
    assert float(planned_s) == pytest.approx(decode_s)


def test_an_instance_can_be_slowed_down_and_back_while_it_runs(emulate):
    c = Constants(p1=0, p2=0, p3=0, p4=0.001, p5=0, p6=0, p7=0, p8=0.001)
    instance = emulate(c)
    asked = {"prompt": "x", "max_tokens": 11, "ignore_eos": True}
    planned_s = []
    for factor in (1.0, 20.0, 1.0):
        answer = instance.post("/emulator/slowdown", {"factor": factor})
        assert answer.json() == {"factor": factor}
        before_s = instance.metric("vllm:inter_token_latency_seconds_sum")
        instance.post("/v1/completions", asked)
        planned_s.append(instance.metric("vllm:inter_token_latency_seconds_sum") - before_s)
    assert planned_s == pytest.approx([0.01, 0.2, 0.01])


@pytest.mark.parametrize("factor", [0, -1, "fast", None])
def test_a_slowdown_that_cannot_be_is_refused(instance, factor):
    assert instance.post("/emulator/slowdown", {"factor": factor}).status_code == 400
    assert instance.server.emulated.loop.engine.slowdown == 1.0


def test_late_wake_ups_do_not_add_up(emulate):
    c = Constants(p1=0, p2=0, p3=0, p4=0.001, p5=0, p6=0, p7=0, p8=0.013)
    instance = emulate(c, time_scale=10)
    asked = {"prompt": "x", "max_tokens": 501, "ignore_eos": True}
    for _ in range(30):
        started_s = time.perf_counter()
        instance.post("/v1/completions", asked)
        if (took_s := time.perf_counter() - started_s) < 0.95:
            break
    # 500 steps of 1.3 ms: a timer that rounds each one up to 2 ms would take 1 s.
    assert 0.63 < took_s < 0.95


def test_a_queued_stream_has_its_headers_and_leaves_the_queue_with_its_client(emulate):
    instance = emulate(max_num_seqs=1)
    with send(instance, {**LONG, "stream": True}) as first:
        assert first.recv(12) == b"HTTP/1.1 200"
        instance.wait_for(RUNNING, 1)
        with send(instance, {**LONG, "stream": True}) as second, send(instance, LONG):
            head = second.recv(4096)
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert b"text/event-stream" in head
            assert b"data:" not in head
            instance.wait_for(WAITING, 2)
        instance.wait_for(WAITING, 0)
        assert instance.metric(RUNNING) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_and_frees_the_cache(emulate, stream):
    instance = emulate()
    connection = send(instance, {**LONG, "stream": stream, "n": 2})
    instance.wait_for(RUNNING, 2)
    assert instance.metric(KV) > 0
    connection.close()
    instance.wait_for(RUNNING, 0)
    assert instance.metric(KV) == 0
    # Not even half of what was asked for.
    assert instance.metric("vllm:generation_tokens_total") < 6000


def test_a_half_close_is_a_disconnect(emulate):
    instance = emulate()
    with send(instance, {**LONG, "stream": True}) as connection:
        instance.wait_for(RUNNING, 1)
        connection.shutdown(socket.SHUT_WR)
        instance.wait_for(RUNNING, 0)
        assert b"[DONE]" not in rest_of(connection)


def test_a_full_queue_is_503(emulate):
    instance = emulate(max_num_seqs=1, max_num_queued_reqs=2)
    with contextlib.ExitStack() as held:
        for gauge, count in ((RUNNING, 1), (WAITING, 1), (WAITING, 2)):
            held.enter_context(send(instance, LONG))
            instance.wait_for(gauge, count)
        response = instance.post("/v1/completions", LONG)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (503, 503, "Service Unavailable")
    assert "retry-after" not in response.headers
    assert instance.metric("vllm:admission_rejections_total") == 1


def test_preemption_under_pressure_still_gives_every_token(emulate):
    instance = emulate(num_gpu_blocks=20, max_model_len=300)
    asked = {"prompt": [1] * 60, "max_tokens": 120, "ignore_eos": True, "n": 3}
    body = instance.post("/v1/completions", asked).json()
    assert body["usage"]["completion_tokens"] == 360
    assert instance.metric("vllm:num_preemptions_total") > 0
    assert instance.metric("vllm:generation_tokens_total") == 360


def test_a_client_that_does_not_read_holds_up_nobody(emulate):
    instance = emulate(time_scale=20)
    with send(instance, {**LONG, "stream": True}) as slow:
        instance.wait_for(RUNNING, 1)
        quick = instance.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
        assert quick.status_code == 200
        instance.wait_for(RUNNING, 0)  # the engine is done before a byte of it was read
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += slow.recv(1 << 20)
    assert data.count(b"data: ") == 6001
    assert b"data: [DONE]\n\n" in data


def test_a_connection_is_kept_alive_from_stream_to_stream(instance):
    limits = httpx.Limits(max_connections=1)
    with httpx.Client(base_url=instance.base_url, limits=limits) as client:
        for _ in range(3):
            asked = {"prompt": "x", "max_tokens": 3, "stream": True}
            with client.stream("POST", "/v1/completions", json=asked) as response:
                assert response.read().endswith(b"data: [DONE]\n\n")
                stream = response.extensions["network_stream"]
                ports = {stream.get_extra_info("client_addr")}
        assert len(ports) == 1


def test_the_same_load_twice_leaves_nothing_behind(emulate):
    instance = emulate(time_scale=5)

    def ask(i):
        asked = {"prompt": f"number {i}", "max_tokens": 50, "stream": i % 2 == 0}
        httpx.post(f"{instance.base_url}/v1/completions", json=asked, timeout=60)

    with ThreadPoolExecutor(40) as threads:
        list(threads.map(ask, range(40)))
    assert instance.metric(RUNNING) == instance.metric(WAITING) == instance.metric(KV) == 0
    assert not instance.server.emulated.loop._open


def test_shutdown_ends_open_streams_with_abort(emulate):
    instance = emulate()
    with (
        send(instance, {**LONG, "stream": True}) as streamed,
        send(instance, LONG) as plain,
    ):
        instance.wait_for(RUNNING, 2)
        instance.server.should_exit = True
        answers = [rest_of(connection) for connection in (streamed, plain)]
    assert b'"finish_reason":"abort"' in answers[0]
    assert answers[0].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b'"finish_reason":"abort"' in answers[1]
