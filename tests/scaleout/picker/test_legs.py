"""Requests that the picker has a sidecar split: two endpoints, both legs charged and settled."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.profile_file import profile_document, write_profile_file
from hetero_gateway.scaleout.picker.http2 import frames
from hetero_gateway.scaleout.picker.http2.frames import DATA, ErrorCode
from hetero_gateway.scaleout.picker.protocol.messages_pb2 import ProcessingResponse
from tests.fakes.asking import PROCESS, REPORT, body_bytes, head_bytes, in_data, response_head_bytes
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.envoy import RunningPicker, running_picker
from tests.fakes.peers import Peer, peer_at
from tests.fakes.pickers import port_of
from tests.fakes.running import eventually, loads_of
from tests.fakes.vllm import FakeInstance, fake_instances
from tests.gateway.dataplane.test_two_legs import ANSWERS, PROMPTS, TRANSFER, profile

HEADER = "x-prefiller-host-port"
LONG = b'{"model":"m","max_tokens":30,%b"messages":[{"role":"user","content":"%b"}]}'


def asked(*, streams: bool = False, extra: bytes = b"") -> bytes:
    return body_bytes(LONG % (b'"stream":true,' * streams + extra, b" fox" * 800))


@contextlib.asynccontextmanager
async def picking(folder: Path, **picker: Any) -> AsyncIterator[tuple[RunningPicker, Peer, Any]]:
    """A picker over an instance for prompts and one for answers, and who asks it."""
    async with fake_instances(2) as fakes:
        rows = []
        for i, (fake, constants) in enumerate(zip(fakes, (PROMPTS, ANSWERS), strict=True)):
            file = folder / f"{i}.yaml"
            write_profile_file(file, profile_document(profile(constants), {"how": "derived"}))
            row = {"id": f"i{i}", "base_url": fake.url, "profile": str(file), "model": "m"}
            rows.append(row | {"kv_transfer": TRANSFER})
        config = {
            "server": {"port": 0},
            "picker": {"port": 0, "drain_s": 0} | picker,
            "scheduler": {"split_requests": "each"},
            "instances": rows,
        }
        async with running_picker(GatewayConfig.model_validate(config)) as running:
            instances = running.gateway.fleet.instances
            await eventually(lambda: all(each.up for each in instances.values()))
            async with peer_at(port_of(running), path=PROCESS) as peer:
                yield running, peer, fakes


async def headers_for(peer: Peer, number: int, body: bytes, *fields: tuple[str, str]) -> Any:
    """The header fields that the answer to a request sets, and those that it removes."""
    peer.open(number, head_bytes(*fields))
    await peer.until(DATA, number)
    peer.send(in_data(number, body))
    _, answer = await peer.until(DATA, number)
    mutation = ProcessingResponse.FromString(answer[5:]).request_body.response.header_mutation
    set_to = {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}
    return set_to, list(mutation.remove_headers)


def at(fake: FakeInstance) -> str:
    return f"127.0.0.1:{fake.port}"


async def over(picker: RunningPicker) -> None:
    """Every load is exactly 0."""
    await eventually(lambda: all(each == (0.0, 0, 0) for each in loads_of(picker.gateway)))


async def test_the_sidecar_is_told_who_computes_the_prompt(tmp_path: Path) -> None:
    async with picking(tmp_path, prefill_header=HEADER) as (picker, peer, fakes):
        found, removed = await headers_for(peer, 1, asked(), (HEADER, "10.6.6.6:1"))
        assert found["x-gateway-destination-endpoint"] == at(fakes[1])
        assert found[HEADER] == at(fakes[0])
        assert HEADER not in removed
        assert [each[2] for each in loads_of(picker.gateway)] == [1, 1]
        # Nobody sees when the prompt's cache is fetched: it is taken for so after some time.
        await eventually(lambda: [each[2] for each in loads_of(picker.gateway)] == [0, 1])
        peer.send(in_data(1, response_head_bytes()))
        await peer.until(DATA, 1)
        peer.send(frames.reset(1, ErrorCode.CANCEL))
        await over(picker)
        assert picker.gateway.metrics.handovers["handed_over"] == 1


async def test_a_reported_first_token_ends_the_leg_of_the_prompt(tmp_path: Path) -> None:
    async with picking(tmp_path, prefill_header=HEADER) as (picker, peer, _):
        (member,) = picker.server.picker._servers[0].register
        member.reports = True
        found, _ = await headers_for(peer, 1, asked(streams=True))
        assert HEADER in found
        scheduler = picker.gateway.fleet.scheduler
        state = next(iter(scheduler.members.table.states.values()))
        assert state.waiting
        peer.send(in_data(1, response_head_bytes()))
        await peer.until(DATA, 1)
        assert not state.waiting  # its prompt is computed, and is there still
        assert loads_of(picker.gateway)[0][2] == 1
        (ticket,) = picker.server.picker.resources.tickets.issued
        async with peer_at(port_of(picker), path=REPORT) as reporter:
            reporter.open(1, ticket + b" first", ends=True)
            await reporter.trailers(1)
        assert [each[2] for each in loads_of(picker.gateway)] == [0, 1]
        peer.send(frames.reset(1, ErrorCode.CANCEL))
        await over(picker)


async def test_a_client_that_leaves_takes_both_legs_off(tmp_path: Path) -> None:
    async with picking(tmp_path, prefill_header=HEADER) as (picker, peer, _):
        await headers_for(peer, 1, asked(streams=True))
        peer.send(frames.reset(1, ErrorCode.CANCEL))
        await over(picker)


async def test_without_the_header_or_where_it_cannot_be_nothing_is_split(tmp_path: Path) -> None:
    async with picking(tmp_path) as (picker, peer, _):
        found, removed = await headers_for(peer, 1, asked(), (HEADER, "10.6.6.6:1"))
        assert HEADER not in found
        assert HEADER in removed
        assert sorted(each[2] for each in loads_of(picker.gateway)) == [0, 1]
        peer.send(frames.reset(1, ErrorCode.CANCEL))
        await over(picker)
    async with picking(tmp_path, prefill_header=HEADER) as (picker, peer, _):
        found, _ = await headers_for(peer, 1, asked(extra=b'"n":2,'))
        assert HEADER not in found
        found, _ = await headers_for(peer, 3, asked(), (":path", "/v1/messages"))
        assert HEADER not in found
        peer.send(frames.reset(1, ErrorCode.CANCEL), frames.reset(3, ErrorCode.CANCEL))
        await over(picker)
