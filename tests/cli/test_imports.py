"""What a command imports: memory of a gateway, and the time that every command takes to start."""

import subprocess
import sys

import pytest

CONFIG = """
server: {host: 127.0.0.1, port: 0}
instances:
  - {id: a, base_url: "http://127.0.0.1:9", profile: V100-32GB-NVLink2/Llama-3-8B/tp4}
"""
SERVE = """
import asyncio, sys
from pathlib import Path
import hetero_gateway.cli.serve
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.serve import server
from hetero_gateway.serve.app import create_app

async def ask(app, path):
    answer = []

    async def send(message):
        answer.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"",
             "client": None}
    await app(scope, asyncio.Event().wait, send)
    return answer[0]["status"]

async def run(path):
    app = create_app(load_gateway_config(path), path)
    await app.gateway.start()
    for asked in ("/livez", "/readyz", "/version", "/v1/models", "/metrics", "/nothing"):
        print(await ask(app, asked), end=" ")
    print()
    print(*sys.modules)
    print(await ask(app, "/admin/instances"))
    print(*sys.modules)
    await app.gateway.stop()

asyncio.run(run(Path(sys.argv[1])))
"""
COMMAND = """
import sys
from hetero_gateway.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(*sys.modules, file=sys.stderr)
"""
DRAWING = {"matplotlib", "plotly"}
SERVERS = {"asyncio", "fastapi", "uvicorn", "httpx"}


def modules_of(text: str) -> set[str]:
    """All that was imported, packages of packages by the first two names as well."""
    names = text.split()
    return {name.split(".")[0] for name in names} | {".".join(n.split(".")[:2]) for n in names}


def test_a_gateway_imports_nothing_that_it_does_not_need(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text(CONFIG)
    ran = subprocess.run(
        [sys.executable, "-c", SERVE, str(path)], capture_output=True, text=True, check=True
    )
    statuses, before, refused, after = ran.stdout.splitlines()
    assert (statuses.split(), refused) == (["200", "503", "200", "200", "200", "404"], "401")
    modules = modules_of(before)
    assert "fastapi" in modules_of(after)  # with the first look at /admin
    unwanted = {"numpy", "scipy", "numba", "rich", "pygments", "fastapi", "httpx", "websockets"}
    unwanted |= {"ctypes", "obstore", "psycopg", *DRAWING}
    ours = {"sim", "planner", "lab", "deploy", "core.sharing", "scaleout.sharing"}
    assert not modules & unwanted
    assert not {f"hetero_gateway.{name}" for name in ours} & set(before.split())
    assert "hetero_gateway.cli.reports" not in after


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["--version"], {"pydantic", "yaml", "numpy", "scipy", "rich", *SERVERS, *DRAWING}),
        (["validate", "-c"], {"numpy", "scipy", "rich", *SERVERS, *DRAWING}),
        (["emulate", "--help"], {"numpy", "scipy", "rich", *SERVERS, *DRAWING}),
        (["status", "--help"], {"numpy", "scipy", "rich", *SERVERS, *DRAWING}),
        (["plan", "--help"], {"pydantic", "numpy", "scipy", "rich", *SERVERS, *DRAWING}),
    ],
)
def test_a_command_imports_little_before_it_begins(words, unwanted, tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text(CONFIG)
    words = [*words, str(path)] if words[-1] == "-c" else words
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, check=True
    )
    assert ran.stdout
    assert not modules_of(ran.stderr) & unwanted
