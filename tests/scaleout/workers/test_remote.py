"""Workers and their scheduler process in one event loop: what is asked, told and taken over."""

import asyncio
import contextlib
import json
import time
from typing import Any

import httpx
import msgspec
import pytest

from hetero_gateway.core.request import Request
from hetero_gateway.gateway.dataplane.intake import Job
from hetero_gateway.gateway.dataplane.placement import LocalDispatcher
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.scaleout.workers import messages
from hetero_gateway.scaleout.workers.messages import Channel, FrameReader, frame
from hetero_gateway.scaleout.workers.session import RequestSession
from hetero_gateway.serve.control.public import model_list
from tests.fakes.running import CHAT, Rig, RunningGateway, chat, eventually, rig
from tests.fakes.vllm import FakeInstance, fake_instances


def body(stream: bool = False, tokens: int = 10, **fake: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": [1] * tokens,
        "max_tokens": 50,
        "stream": stream,
        "fake": fake,
    }


def two_workers(instances: int = 2, **sections: Any) -> contextlib.AbstractAsyncContextManager[Rig]:
    health = {"probe_interval_s": 0.1, "scrape_interval_s": 0.2}
    return rig(instances, workers=2, health=health, **sections)


async def post(
    client: httpx.AsyncClient, running: RunningGateway, request: dict[str, Any]
) -> httpx.Response:
    return await client.post(f"http://127.0.0.1:{running.port}/v1/completions", json=request)


def part(running: RunningGateway) -> None:
    """The scheduler process is gone for every worker, until they connect again."""
    for worker in running.workers:
        channel = worker.remote._channel
        assert channel is not None
        channel.abort()


def in_flight(running: RunningGateway) -> int:
    return sum(count for _, _, count in running.loads())


async def streaming(
    client: httpx.AsyncClient, running: RunningGateway, count: int
) -> list[asyncio.Future[httpx.Response]]:
    """So many streams that are under way."""
    request = body(stream=True, events=40, delay_s=0.1)
    streams = [asyncio.ensure_future(post(client, running, request)) for _ in range(count)]
    await eventually(lambda: in_flight(running) == count)
    return streams


def hub_of(running: RunningGateway) -> Any:
    return running.gateway.hub


def silence(running: RunningGateway) -> None:
    """The scheduler process says nothing any more, as a stopped one, to whoever is connected."""
    hub_of(running)._timer.cancel()
    for session in hub_of(running).sessions:
        session.channel.send = lambda message: None


async def test_both_workers_are_placed_and_recorded_by_one_scheduler() -> None:
    async with two_workers(scheduler={"policy": "round-robin"}) as (running, client, fakes):
        answers = [await post(client, running, body()) for _ in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 8
        ids = [answer.headers["x-hetero-gateway-instance"] for answer in answers]
        assert ids == ["i0", "i1"] * 4  # though each worker has every other request
        await eventually(running.settled)
        assert [fake.requests for fake in fakes] == [4, 4]
        await running.counted()
        assert running.gateway.metrics.counts("m", "i0").outcomes["completed"] == 4
        records = running.gateway.dataplane.decisions.newest_first()
        told = [answer.headers["x-request-id"] for answer in answers]
        assert [record.request_id for record in records] == told[::-1]
        assert len(running.gateway.dataplane.history) == 8
        instances = list(running.gateway.fleet.instances.values())
        await eventually(lambda: [running.gateway.connections_to(i) for i in instances] == [1, 1])


async def test_streams_of_both_workers_set_one_speed() -> None:
    async with two_workers(1) as (running, client, _):
        await asyncio.gather(*await streaming(client, running, 4))
        await eventually(running.settled)
        (there,) = running.gateway.fleet.scheduler.members.table.states.values()
        assert sum(row.steps for row in there.observations.steps) > 10


async def test_refusals_are_as_of_one_process() -> None:
    async with two_workers() as (running, client, _):
        for request_body, status, code in (
            (body() | {"model": "nope"}, 404, "model_not_found"),
            (body(tokens=100_000), 400, "context_length_exceeded"),
            (body() | {"model": 5}, 400, "invalid_type"),
        ):
            answer = await post(client, running, request_body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            await eventually(running.settled)


async def test_a_failed_attempt_is_tried_elsewhere_and_counted_once() -> None:
    async with two_workers() as (running, client, fakes):
        fakes[0].fault = {"die": "before_head"}
        fakes[1].fault = {}
        answers = [await post(client, running, body()) for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        await eventually(running.settled)
        metrics = running.gateway.metrics
        assert metrics.upstream_errors["i0", "reset"] >= 1
        assert metrics.retries["reset"] == metrics.upstream_errors["i0", "reset"]


async def test_a_full_queue_is_429_and_who_waits_too_long_as_well() -> None:
    queue = {"prefill_depth": 1, "queue": {"max_requests": 1, "timeout_s": 0.5}}
    async with two_workers(1, scheduler=queue) as (running, client, _):
        slow = body(tokens=3000, stream=True, hang=True)
        sent = [asyncio.ensure_future(post(client, running, slow)) for _ in range(2)]
        await eventually(lambda: in_flight(running) == 2)
        waiting = asyncio.ensure_future(post(client, running, slow))
        await eventually(lambda: running.gateway.fleet.scheduler.queued == 1)
        refused = await post(client, running, slow)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        late = await waiting
        assert (late.status_code, late.json()["error"]["code"]) == (429, "queue_timeout")
        assert int(late.headers["retry-after"]) >= 1
        for each in sent:
            each.cancel()
        await eventually(running.settled)


async def test_an_instance_that_comes_over_admin_is_known_to_workers_at_once() -> None:
    async with two_workers(1) as (running, client, _), fake_instances(1) as more:
        url = f"http://127.0.0.1:{running.port}/admin/instances"
        headers = {"host": "localhost"}
        entry = {"id": "late", "base_url": more[0].url}
        added = await client.post(url, json=entry, headers=headers)
        assert added.status_code == 201
        gateway = running.gateway
        await eventually(lambda: gateway.fleet.instances[added.json()["id"]].up)
        assert (await client.patch(f"{url}/i0", json={"draining": True})).status_code == 200
        answers = [await post(client, running, body()) for _ in range(4)]
        assert {a.headers["x-hetero-gateway-instance"] for a in answers} == {"late"}
        assert (await client.delete(f"{url}/late")).status_code == 200
        await eventually(lambda: all(list(w.fleet.instances) == ["i0"] for w in running.workers))


async def test_no_request_ends_with_the_scheduler_and_it_is_exact_again() -> None:
    async with two_workers() as (running, client, _):
        streams = await streaming(client, running, 6)
        await asyncio.sleep(0.5)
        before = running.loads()
        hub = hub_of(running)
        hub._server.close()  # nobody listens for now
        part(running)
        await eventually(lambda: all(worker.remote.alone for worker in running.workers))
        assert running.settled() is False
        await eventually(lambda: in_flight(running) == 0)  # it has let go of what was theirs
        for worker in running.workers:  # and they have charged it themselves
            scheduler = worker.fleet.scheduler
            assert sum(scheduler.members.snapshot(i).in_flight for i in worker.fleet.instances) == 3
        alone = await post(client, running, body())
        assert alone.status_code == 200
        hub._server = await asyncio.get_running_loop().create_unix_server(
            hub._channel, path=running.workers[0]._hub_path
        )
        await eventually(lambda: not any(worker.remote.alone for worker in running.workers))
        await eventually(lambda: in_flight(running) == 6)
        assert [row[2] for row in running.loads()] == [row[2] for row in before]
        answers = await asyncio.gather(*streams)
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
        await eventually(running.settled)
        for worker in running.workers:
            scheduler = worker.fleet.scheduler
            assert all(scheduler.members.snapshot(i).load_s == 0 for i in worker.fleet.instances)


async def test_who_waits_when_the_scheduler_goes_is_placed_all_the_same() -> None:
    queue = {"prefill_depth": 1, "queue": {"timeout_s": 60}}
    async with two_workers(1, scheduler=queue) as (running, client, _):
        slow = body(tokens=3000, first_delay_s=3.0, stream=True)
        sent = [asyncio.ensure_future(post(client, running, slow)) for _ in range(2)]
        await eventually(lambda: in_flight(running) == 2)
        waiting = [
            asyncio.ensure_future(post(client, running, body(tokens=3000))) for _ in range(3)
        ]
        await eventually(lambda: running.gateway.fleet.scheduler.queued == 3)
        part(running)
        await eventually(lambda: running.gateway.fleet.scheduler.queued == 3)  # asked anew
        answers = await asyncio.gather(*sent, *waiting)
        assert {answer.status_code for answer in answers} == {200}
        await eventually(running.settled)


async def test_what_is_elsewhere_when_the_scheduler_goes_is_counted_by_who_is_there_then() -> None:
    one = FakeInstance(("one",))
    async with fake_instances(1, models=("big",)) as (outside,):
        fallback = {"model": "big", "base_url": outside.url}
        models = {"one": {"fallbacks": [fallback]}}
        async with rig([one], workers=2, models=models) as (running, client, _):
            await one.kill()
            url = f"http://127.0.0.1:{running.port}/v1/completions"
            request = body(stream=True, events=10, delay_s=0.2) | {"model": "one"}
            answer = asyncio.ensure_future(client.post(url, json=request))
            await eventually(lambda: outside.requests == 1)
            part(running)
            await eventually(lambda: not any(worker.remote.alone for worker in running.workers))
            assert (await answer).headers["x-hetero-gateway-fallback"] == "127.0.0.1/big"
            await eventually(running.settled)
            metrics = running.gateway.metrics
            assert metrics.fallbacks["one", "127.0.0.1/big"] == 1
            assert metrics.series("one", "outside").outcomes["completed"] == 1


@pytest.mark.slow
async def test_three_hundred_requests_while_the_scheduler_comes_and_goes() -> None:
    async with two_workers(3) as (running, client, _):
        gate, over = asyncio.Semaphore(40), asyncio.Event()

        async def one(number: int) -> int:
            async with gate:
                events = 1 + number % 12
                request = body(number % 3 > 0, 10 + number % 500, events=events, delay_s=0.02)
                return (await post(client, running, request)).status_code

        async def come_and_go() -> int:
            times = 0
            while not over.is_set():
                await asyncio.sleep(0.11)
                if not any(worker.remote.alone for worker in running.workers):
                    part(running)
                    times += 1
            return times

        flapping = asyncio.ensure_future(come_and_go())
        statuses = await asyncio.gather(*(one(i) for i in range(300)))
        over.set()
        assert await flapping > 4
        assert set(statuses) == {200}
        await running.counted()
        every = running.gateway.metrics.every_series.values()
        assert sum(series.outcomes["completed"] for series in every) == 300
        assert sum(sum(series.duration.counts) for series in every) == 300


async def test_what_workers_count_comes_to_what_one_process_counts() -> None:
    found = []
    for workers in (1, 2):
        async with rig(workers=workers) as (running, client, _):
            for request in (
                body(),
                body(tokens=20),
                body(stream=True, events=5, delay_s=0.01),
                body(status=400),
                body(stream=True, die="after_events"),
            ):
                with contextlib.suppress(httpx.HTTPError):
                    await post(client, running, request)
            await running.counted()
            metrics = running.gateway.metrics
            series = metrics.counts("m", "i0")
            kinds = series.duration, series.ttft, series.tpot
            assert sum(series.duration.counts) == 5
            assert all(each.sum > 0 for each in kinds)
            found.append(
                [
                    {label: number for label, number in series.outcomes.items() if number},
                    metrics.classes,
                    metrics.statuses,
                    [sum(each.counts) for each in kinds],
                    (series.input_tokens, series.cached_tokens, series.output_tokens),
                    sum(metrics.output_prediction.counts),
                    sum(metrics.latency_prediction.counts),
                    [row[1:] for row in running.gateway.dataplane.history],
                    running.gateway.dataplane.dispatcher.intake._bytes_per_token._models.keys(),
                ]
            )
    assert found[0] == found[1]


async def test_a_worker_that_ends_passes_on_what_it_has_counted() -> None:
    async with two_workers() as (running, client, _):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(6):
                tasks.create_task(post(client, running, body()))
        for worker in running.workers:
            worker.remote.close()
        series = running.gateway.metrics.every_series
        await eventually(lambda: sum(s.outcomes["completed"] for s in series.values()) == 6)


async def test_a_worker_that_is_gone_takes_its_requests_with_it() -> None:
    async with two_workers() as (running, client, _):
        streams = await streaming(client, running, 4)
        hub = hub_of(running)
        session = next(iter(hub.sessions))
        session.lost()
        assert in_flight(running) == 2
        session.channel.abort()
        await asyncio.gather(*streams)
        await eventually(running.settled)


async def test_what_is_not_let_in_any_more_costs_no_other_that_is_outstanding() -> None:
    async with two_workers() as (running, client, _):
        streams = await streaming(client, running, 2)
        remote = running.workers[0].remote
        (good,) = [remote._carried(place.job, place) for place in remote._open.values()]
        facts = msgspec.structs.replace(good.facts, path="/v1/responses/gone", counted=None)
        facts = msgspec.structs.replace(
            facts, parsed=ParsedRequest("", False, None, 1, 0, 0, None, 1)
        )
        bad = msgspec.structs.replace(good, key=good.key + 1, facts=facts)
        gateway = running.gateway
        session = RequestSession(gateway.dataplane.dispatcher, gateway.admission, lambda _: None)
        session.received([messages.Outstanding([bad, good])])
        assert (len(session), in_flight(running)) == (1, 3)
        session.end()
        assert in_flight(running) == 2
        await asyncio.gather(*streams)
        await eventually(running.settled)


@pytest.mark.parametrize("placed", [False, True])
async def test_a_stream_that_goes_on_elsewhere_stays_one_for_another_scheduler(
    placed: bool,
) -> None:
    async with two_workers(scheduler={"policy": "round-robin"}) as (running, client, fakes):
        fakes[0].fault = {"die": "after_events", "events": 4, "delay_s": 0.1}
        fakes[1].fault = {"events": 60, "delay_s": 0.1}
        asked = chat("hello", stream=True, max_tokens=90)
        stream = asyncio.ensure_future(client.post(CHAT, json=asked))
        await eventually(lambda: fakes[0].open == 1)
        (worker,) = [worker for worker in running.workers if worker.remote._open]
        remote, before = worker.remote, worker.remote._session
        if placed:
            await eventually(lambda: fakes[1].open == 1)
            part(running)
        else:
            silence(running)  # it is asked, and never answers
        await eventually(lambda: remote._session > before and fakes[1].open == 1)
        sessions = [session for session in hub_of(running).sessions if session._requests]
        (request,) = (sessions[0] if sessions else remote._own._session)._requests.values()
        assert request.job.told_tokens == 4
        (place,) = remote._open.values()
        whole, leg = request.job.request, place.request
        assert leg.prompt_tokens == whole.prompt_tokens + 4
        assert leg.predicted_output_tokens == whole.predicted_output_tokens - 4
        assert request.place.dispatch.request.prompt_tokens == leg.prompt_tokens
        assert (await stream).text.endswith("data: [DONE]\n\n")
        await eventually(running.settled)


async def test_silence_counts_as_gone() -> None:
    async with two_workers() as (running, client, _):
        silence(running)
        await eventually(lambda: any(worker.remote.gone.is_set() for worker in running.workers))
        answer = await post(client, running, body())
        assert answer.status_code == 200
        await eventually(running.settled)


# Paths that are no engine's, while the scheduler process hangs

PUBLIC = ("/livez", "/health", "/ping", "/version", "/readyz", "/v1/models", "/v1/models/m")


def hang(running: RunningGateway) -> None:
    """The scheduler process takes connections and says nothing, as one that is stopped."""

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    running.app.control = never  # type: ignore[assignment]
    silence(running)
    hub_of(running)._server.close()


async def timed(
    client: httpx.AsyncClient, running: RunningGateway, path: str, port: int | None = None
) -> tuple[httpx.Response, float]:
    began_s = time.monotonic()
    answer = await client.get(f"http://127.0.0.1:{port or running.port}{path}")
    return answer, time.monotonic() - began_s


async def test_public_paths_are_answered_at_once_whatever_the_scheduler_process_does() -> None:
    async with two_workers() as (running, client, _):
        hang(running)
        for _ in range(12):  # before that is noticed, and long after
            for path in PUBLIC:
                answer, took_s = await timed(client, running, path)
                assert answer.status_code == 200, path
                assert took_s < 1.0
            assert answer.json()["id"] == "m"
            await asyncio.sleep(1.0)
        assert any(worker.remote.alone for worker in running.workers)


async def test_no_path_hangs_with_the_scheduler_process() -> None:
    async with two_workers() as (running, client, _):
        hang(running)
        for path in ("/metrics", "/dashboard", "/admin/instances", "/openapi.json", "/nothing"):
            answer, took_s = await timed(client, running, path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2"), path
            assert answer.json()["error"]["code"] == "scheduler_unavailable"
            assert took_s < 10.0  # silence is noticed after four seconds at most
        began_s = time.monotonic()
        answer = await client.post(running.url + "/admin/reload")
        assert (answer.status_code, time.monotonic() - began_s < 6.0) == (503, True)


async def test_what_takes_long_of_a_scheduler_process_that_works_is_waited_for() -> None:
    async with two_workers() as (running, client, _):
        control = running.app.control

        async def slowly(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(20)
            await control(scope, receive, send)

        running.app.control = slowly  # type: ignore[assignment]
        answer, took_s = await timed(client, running, "/metrics")
        assert answer.status_code == 200
        assert took_s > 20


async def test_a_scheduler_process_that_comes_back_answers_who_waits() -> None:
    async with two_workers() as (running, client, _):
        control = running.app.control
        hang(running)
        part(running)
        await eventually(lambda: all(worker.remote.alone for worker in running.workers))
        asked = asyncio.ensure_future(timed(client, running, "/metrics"))
        await asyncio.sleep(1.0)
        running.app.control = control
        later, took_s = await timed(client, running, "/metrics")
        assert later.status_code == 200
        assert took_s < 1.0
        assert (await asked)[0].status_code in (200, 503)


async def test_workers_list_what_the_gateway_lists() -> None:
    models = {"other": {"serve": "m"}}
    async with two_workers(models=models) as (running, client, fakes):

        async def ready() -> list[int]:
            asked = [await timed(client, running, "/readyz", port) for port in running.ports]
            return [answer.status_code for answer, _ in asked]

        gateway, anyone = running.gateway, running.gateway.admission.client_of([])
        await eventually(lambda: gateway.fleet.models()["m"].max_model_len is not None)
        listed = model_list(gateway, anyone)
        assert [card["id"] for card in listed["data"]] == ["m", "other"]
        for worker in running.workers:
            await eventually(lambda: model_list(worker, anyone) == listed)  # noqa: B023
        answer, _ = await timed(client, running, "/v1/models")
        assert answer.json() == json.loads(json.dumps(listed))
        missing, _ = await timed(client, running, "/v1/models/nope")
        assert missing.json()["error"]["code"] == "model_not_found"
        assert await ready() == [200, 200]
        for fake in fakes:
            fake.healthy = False
        await eventually(lambda: not gateway.fleet.ready())
        await eventually(lambda: not any(w.listing.ready() for w in running.workers))
        assert await ready() == [503, 503]
        assert (await timed(client, running, "/livez"))[0].status_code == 200
        assert (await timed(client, running, "/v1/models"))[0].json()["data"] == []


async def test_public_paths_take_what_they_took() -> None:
    async with two_workers() as (running, client, _):
        url = running.url
        assert (await client.post(url + "/ping")).status_code == 200
        assert (await client.head(url + "/livez")).content == b""
        wrong = await client.delete(url + "/readyz")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
        assert (await client.get(url + "/v1/models/")).status_code == 404
        running.workers[0].draining = True
        answer = await client.get(url + "/readyz")
        assert (answer.status_code, answer.json()) == (503, {"status": "draining"})


# The messages themselves


def test_frames_come_in_any_pieces() -> None:
    sent: list[list[Any]] = [[messages.Leave(1), messages.Began(2)], [messages.Over(3, "")], []]
    data = b"".join(frame(part) for part in sent)
    for size in (1, 3, 7, len(data)):
        received: list[Any] = []
        reader = FrameReader(messages.FromWorker, received.append)
        for start in range(0, len(data), size):
            reader.feed(data[start : start + size])
        assert received == sent


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff....", b"\x03\x00\x00\x00abc"])
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    reader = FrameReader(messages.FromWorker, lambda _: None)
    with pytest.raises((ValueError, msgspec.DecodeError)):
        reader.feed(data)


async def test_messages_of_one_turn_go_in_one_write() -> None:
    written: list[bytes] = []

    class Transport(asyncio.Transport):
        def write(self, data: Any) -> None:
            written.append(data)

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            pass

    channel = Channel(messages.FromWorker)
    channel.connection_made(Transport())
    for key in range(5):
        channel.send(messages.Began(key))
    await asyncio.sleep(0)
    assert len(written) == 1
    received: list[Any] = []
    FrameReader(messages.FromWorker, received.append).feed(written[0])
    assert received == [[messages.Began(key) for key in range(5)]]


async def test_what_cannot_be_sent_costs_its_own_request() -> None:
    async with two_workers() as (running, client, _):
        good = asyncio.ensure_future(
            post(client, running, body(stream=True, events=5, delay_s=0.1))
        )
        await eventually(lambda: in_flight(running) == 1)
        odd = await post(client, running, body() | {"max_tokens": 10**30})
        assert odd.status_code in (200, 400, 500)
        assert (await good).text.endswith("data: [DONE]\n\n")
        remote = running.workers[0].remote
        channel = remote._channel
        assert channel is not None
        channel.send(messages.Settle(10**30, "completed", True, None))  # type: ignore[arg-type]
        assert (await post(client, running, body())).status_code == 200
        assert (await post(client, running, body())).status_code == 200
        assert not remote.alone
        await eventually(running.settled)


@pytest.mark.parametrize(
    "request_body",
    [
        body(),
        body(stream=True) | {"n": 3, "max_tokens": 7},
        {"model": "m", "prompt": "a text " * 500, "max_tokens": 9},
        {"model": "m", "prompt": ["one", "two"], "cache_salt": "s"},
    ],
    ids=["tokens", "several", "text", "prompts"],
)
@pytest.mark.parametrize("policy", ["finish-time", "session"])
async def test_a_request_is_described_as_in_one_process(request_body, policy, monkeypatch):
    seen, submit = [], LocalDispatcher.submit
    for workers in (1, 2):
        scheduler = {"policy": policy}
        async with rig(workers=workers, scheduler=scheduler) as (running, client, fakes):
            client.headers["x-session-id"] = "a"
            asked: list[Request] = []

            def spy(self: LocalDispatcher, job: Job, *args: Any, **options: Any) -> Any:
                asked.append(job.request)  # noqa: B023
                return submit(self, job, *args, **options)

            monkeypatch.setattr(LocalDispatcher, "submit", spy)
            assert (await post(client, running, request_body)).status_code == 200
            await eventually(running.settled)
            (request,) = asked
            assert (request.session is not None) == (policy == "session")
            # Their hashes begin with a secret of each gateway's.
            lengths = None if request.prefix is None else request.prefix[1:]
            seen.append((repr(request.replace(prefix=None)), lengths, fakes[0].bodies))
    assert seen[0] == seen[1]
