"""A fake Kubernetes API server: lists in pages, watches, bookmarks, and forgets old versions."""

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.servers import FakeServer


def pod(name: str, address: str, ready: bool = True, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"app": "vllm", **labels}},
        "status": {
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


class FakeApiServer(FakeServer):
    """Pods (or slices) by name; ``put`` and ``delete`` tell those that watch."""

    def __init__(self, page: int = 60) -> None:
        super().__init__()
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []  # their targets
        self.tokens: list[str] = []
        self.refuses = 0  # a status for all that is asked
        self._page = page
        self._version = 100
        self._oldest = 100  # versions before are gone
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()

    def forget(self) -> None:
        """Earlier versions are gone: a watch from one is 410."""
        self._events.clear()
        self._version += 1
        self._oldest = self._version
        self.reset_connections()

    def put(self, *bodies: dict[str, Any]) -> None:
        for body in bodies:
            name = body["metadata"]["name"]
            kind = "MODIFIED" if name in self.objects else "ADDED"
            self.objects[name] = body
            self._note(kind, body)

    def delete(self, *names: str) -> None:
        for name in names:
            self._note("DELETED", self.objects.pop(name))

    def _note(self, kind: str, body: dict[str, Any]) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, json.loads(json.dumps(body))))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        for line in head.split("\r\n"):
            if line.lower().startswith("authorization:"):
                self.tokens.append(line.rpartition(" ")[2])
        target = head.split(" ")[1]
        self.requests.append(target)
        query = {k: v[0] for k, v in parse_qs(urlsplit(target).query).items()}
        if self.refuses:
            self._plain(writer, self.refuses, {})
        elif "watch" in query:
            await self._watch(writer, query)
        else:
            self._list(writer, query)
        await writer.drain()
        return True

    def _plain(self, writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    def _list(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        start = int(query.get("continue", 0))
        items = list(self.objects.values())[start : start + self._page]
        metadata = {"resourceVersion": str(self._version)}
        if start + self._page < len(self.objects):
            metadata["continue"] = str(start + self._page)
        self._plain(writer, 200, {"metadata": metadata, "items": items})

    async def _watch(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        version = int(query["resourceVersion"])
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

        def event(kind: str, body: dict[str, Any]) -> None:
            line = json.dumps({"type": kind, "object": body}).encode() + b"\n"
            # In two pieces: an event need not come at once.
            for part in (line[:20], line[20:]):
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))

        if version < self._oldest:
            event("ERROR", {"code": 410, "message": "too old resource version"})
        else:
            try:
                async with asyncio.timeout(float(query["timeoutSeconds"])):
                    while True:
                        changed = self._changed
                        for number, kind, body in self._events:
                            if number > version:
                                event(kind, body)
                                version = number
                        await writer.drain()
                        await changed.wait()
            except TimeoutError:
                event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})
        writer.write(b"0\r\n\r\n")
