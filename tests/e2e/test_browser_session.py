"""A page in a real browser opens a session with its key, as OpenAI's client for browsers does."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.gateway_files import clients
from tests.fakes.realtime import Speaker, serving

CHROMIUM = "/usr/bin/chromium"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run")  # fmt: skip
PAGE = """<!doctype html><script>
const tell = text => fetch("/told?" + encodeURIComponent(text));
const socket = new WebSocket("%s", ["realtime", "openai-insecure-api-key.%s"]);
socket.onmessage = message => tell(socket.protocol + " " + message.data);
socket.onclose = close => tell("closed " + close.code);
</script>"""


@contextlib.asynccontextmanager
async def page_server() -> AsyncIterator[tuple[str, dict[str, str], asyncio.Queue[str]]]:
    """Its origin, the page that it serves under "page", and what pages tell."""
    pages: dict[str, str] = {}
    told: asyncio.Queue[str] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        except asyncio.IncompleteReadError:  # a connection that was opened in advance
            writer.close()
            return
        if target.startswith("/told?"):
            told.put_nowait(target.removeprefix("/told?"))
        body = pages["page"].encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\n"
        writer.write(head % len(body) + b"connection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", pages, told


async def first_word(url: str, told: asyncio.Queue[str], profile: Path) -> str:
    """What the page there tells first."""
    browser = await asyncio.to_thread(
        subprocess.Popen,
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(90):
            return await told.get()
    finally:
        browser.terminate()
        await asyncio.to_thread(browser.wait)


@pytest.mark.system
async def test_a_page_with_a_key_gets_a_session_and_one_without_does_not(tmp_path: Path) -> None:
    speaker = Speaker()
    speaker.chooses = False  # a subprotocol: vLLM does not
    async with page_server() as (origin, pages, told):
        server = {"cors": {"origins": [origin]}}
        async with serving(speaker, server=server, clients=clients(tmp_path, a={})) as running:
            url = f"ws://127.0.0.1:{running.port}/v1/realtime"
            for shown, expected in (("ka", "realtime%20%7B%22type%22"), ("kb", "closed%201006")):
                pages["page"] = PAGE % (url, shown)
                word = await first_word(f"{origin}/", told, tmp_path / shown)
                assert word.startswith(expected), word
    assert len(speaker.heads) == 1
    assert "ka" not in str(speaker.heads[0].headers.get("sec-websocket-protocol"))
