"""Pickers that do not decide: for what an Envoy with the shipped configuration does then."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from hetero_gateway.scaleout.picker.protocol.messages_pb2 import (
    HealthCheckResponse,
    PartResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from hetero_gateway.scaleout.picker.service import EXT_PROC, HEALTH

Requests = AsyncIterator[ProcessingRequest]
Context = grpc.aio.ServicerContext


async def late(requests: Requests, _: Context) -> AsyncIterator[ProcessingResponse]:
    """Answers nothing, as one that is busy."""
    async for _request in requests:
        await asyncio.sleep(3600)
        yield ProcessingResponse()


async def fails_in_the_middle(
    requests: Requests, context: Context
) -> AsyncIterator[ProcessingResponse]:
    """Has taken the head, and breaks off at the body."""
    async for request in requests:
        if request.WhichOneof("request") != "request_headers":
            await context.abort(grpc.StatusCode.INTERNAL, "broken")
        yield ProcessingResponse(request_headers=PartResponse())


async def ends_in_the_middle(requests: Requests, _: Context) -> AsyncIterator[ProcessingResponse]:
    """Has taken the head, and ends its stream as if all were said."""
    async for request in requests:
        if request.WhichOneof("request") != "request_headers":
            return
        yield ProcessingResponse(request_headers=PartResponse())


async def decides_nothing(requests: Requests, _: Context) -> AsyncIterator[ProcessingResponse]:
    """Lets everything pass, and names no instance."""
    async for request in requests:
        kind = request.WhichOneof("request")
        if kind is not None:
            yield ProcessingResponse(**{kind: PartResponse()})


BEHAVIOURS = (late, fails_in_the_middle, ends_in_the_middle, decides_nothing)


@contextlib.asynccontextmanager
async def undecided_picker(behaviour: object) -> AsyncIterator[int]:
    """Its port; it says that it is healthy."""

    async def healthy(_: bytes, __: Context) -> HealthCheckResponse:
        return HealthCheckResponse(status=1)

    handlers = [
        grpc.method_handlers_generic_handler(
            EXT_PROC,
            {
                "Process": grpc.stream_stream_rpc_method_handler(
                    behaviour,
                    ProcessingRequest.FromString,
                    ProcessingResponse.SerializeToString,
                )
            },
        ),
        grpc.method_handlers_generic_handler(
            HEALTH,
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    healthy, None, HealthCheckResponse.SerializeToString
                )
            },
        ),
    ]
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def resetting(port: int) -> AsyncIterator[int]:
    """The port of a way to a picker that resets the connection once a request's head is answered.

    A health check's call ends with its answer; what is reset is a connection with a body on it.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_connection("127.0.0.1", port)

        async def outward() -> None:
            while data := await reader.read(65536):
                if BODY_MARK in data:
                    writer.transport.abort()
                    there.transport.abort()
                    return
                there.write(data)

        async def inward() -> None:
            while data := await there_reader.read(65536):
                writer.write(data)

        both = [asyncio.ensure_future(outward()), asyncio.ensure_future(inward())]
        tasks.update(both)
        await asyncio.gather(*both, return_exceptions=True)
        writer.transport.abort()
        there.transport.abort()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()


# In the body of every request of these tests.
BODY_MARK = b"messages"
