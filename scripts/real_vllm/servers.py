"""The servers of one run: two vLLM engines and the gateway, as processes that can be restarted.

Shared by scripts/real-vllm, which starts and finally stops them, and by tests/real_vllm, which
kills and restarts engines. So that whoever comes last can clean up, what runs is on disk: each
server is one JSON file in the run directory, with its command, environment and process id.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

SERVED_NAME = "tiny"
# A second name of each instance, to reach one of them on purpose.
ALIASES = {"small": "tiny-fast", "large": "tiny-slow"}
# One says in its answers what of a prompt was cached, of the other only its counters do.
TELLS_CACHED = {"large"}
# Two equal ones that hand KV caches over, by NIXL on this machine's memory.
PAIR = ("prefill", "decode")
# So long they keep what nobody fetches: less than vLLM's 30 s, which every test would wait for.
PAIR_LEASE_S = 10.0
# Starting an engine takes 12-30 s on an idle machine; others may be using it.
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0

ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # So that a response has followers, which go where it was made.
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    # With a second process, and any executor but `uni`, an idle engine polls and keeps cores busy.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass
class Server:
    """One server process.

    Args:
        id: its name, which is also the instance's id in the gateway's configuration.
        argv, env: the command, and what it adds to the environment.
        directory: where its state (``ID.json``) and its log (``ID.log``) are.
        base_url: where it listens; empty until known (the gateway takes a free port).
        pid: of the process that was started last, also after it ended; 0 before the first start.
    """

    id: str
    argv: list[str]
    env: dict[str, str]
    directory: str
    base_url: str = ""
    pid: int = 0

    @property
    def log(self) -> Path:
        return Path(self.directory) / f"{self.id}.log"

    def restart(self, *options: str) -> None:
        """Kill it and start it anew, with further options for as long as it then runs."""
        self.kill()
        plain = self.argv
        at = plain.index("--host")  # what is at the end says that a process is this one
        self.argv = [*plain[:at], *options, *plain[at:]]
        self.start()
        self.argv = plain
        self.save()

    def start(self) -> None:
        """Start it in a session of its own, so that a Ctrl-C reaches only who cleans up."""
        # Not subprocess.Popen: it minds an object that goes away before its process, and here
        # the process outlives the tests that restarted it.
        self.pid = os.posix_spawnp(
            self.argv[0],
            self.argv,
            os.environ | self.env,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        self.save()

    def save(self) -> None:
        state = asdict(self)
        path = Path(self.directory) / f"{self.id}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(state, indent=1))
        partial.replace(path)

    def is_running(self) -> bool:
        """Whether the process lives and is still ours: ids are used again."""
        with contextlib.suppress(ChildProcessError):
            return self.pid > 0 and os.waitpid(self.pid, os.WNOHANG) == (0, 0)
        try:  # not a child of this process, or seen to end before
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False
        # taskset replaces itself by the command behind it, so the end of the line is what stays.
        # A zombie's command line is empty.
        return command.rstrip(b"\0").endswith(self.argv[-1].encode())

    def signal(self, number: int) -> None:
        """Send a signal to its whole process group."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def wait_stopped(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        return wait_until(lambda: not self.is_running(), timeout_s)

    def kill(self) -> None:
        """SIGKILL, and wait until its port is closed: a process that ends holds it for a while."""
        self.signal(signal.SIGKILL)
        port = int(self.base_url.rpartition(":")[2])
        if not wait_until(lambda: not accepts_connections(port), STOP_TIMEOUT_S):
            raise RuntimeError(f"{self.id} outlives SIGKILL")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to what is left of its session, helpers of vLLM's included."""
        self.signal(signal.SIGTERM)
        self.wait_stopped()
        self.signal(signal.SIGKILL)
        self.wait_stopped()
        members = session_members(self.pid)
        # A leader that lives is not ours: the id was used again, which it cannot be while a process
        # of our session is left.
        for pid in members if self.pid not in members else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def is_ready(self) -> bool:
        return bool(self.base_url) and http_status(f"{self.base_url}/health") == 200

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for /health.

        Raises:
            RuntimeError: it ended, or was not ready in time; with the end of its log.
        """
        wait_until(lambda: self.is_ready() or not self.is_running(), timeout_s, pause_s=0.25)
        if not self.is_ready():
            how = "is not ready" if self.is_running() else "ended at its start"
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"{self.id} {how}; the end of {self.log}:\n{tail}")

    def wait_port(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Take ``base_url`` from the address that the server prints."""
        pattern = re.compile(r"serving on (http://[\w.]+:\d+)")

        def printed() -> bool:
            if found := pattern.search(self.log.read_text(errors="replace")):
                self.base_url = found[1]
            return bool(found) or not self.is_running()

        wait_until(printed, timeout_s)
        self.save()


def load_server(path: Path) -> Server:
    """The server that a state file describes."""
    return Server(**json.loads(path.read_text()))


def stop_all(directory: Path) -> None:
    """Stop every server that the run directory knows, the gateway first; then forget them."""
    paths = sorted(directory.glob("*.json"), key=lambda path: path.stem != "gateway")
    servers = [load_server(path) for path in paths]
    for server in servers:
        server.signal(signal.SIGTERM)
    for path, server in zip(paths, servers, strict=True):
        server.stop()
        path.unlink(missing_ok=True)


def engine(id: str, directory: Path, python: Path, model: Path, core: int) -> Server:
    """A vLLM server on one core, not started."""
    port = free_port()
    argv = ["taskset", "-c", str(core), str(python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model), "--served-model-name", SERVED_NAME, ALIASES[id]]
    argv += ["--dtype", fast_dtype(), "--enforce-eager", "--max-model-len", "4096"]
    argv += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    argv += ["--enable-prompt-tokens-details"] if id in TELLS_CACHED else []
    # Else random weights, held to a JSON schema, write spaces for ever.
    grammar = '{"backend": "xgrammar", "disable_any_whitespace": true}'
    argv += ["--structured-outputs-config", grammar]
    argv += ["--distributed-executor-backend", "uni", "--host", "127.0.0.1", "--port", str(port)]
    return Server(id, argv, ENGINE_ENV, str(directory), f"http://127.0.0.1:{port}")


def paired_engine(id: str, directory: Path, python: Path, model: Path, core: int) -> Server:
    """One of ``PAIR``, not started: it can prefill for the other one, and decode."""
    port = free_port()
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": PAIR_LEASE_S},
    }
    argv = ["taskset", "-c", str(core), str(python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model), "--served-model-name", SERVED_NAME, "--dtype", fast_dtype()]
    argv += ["--enforce-eager", "--max-model-len", "4096", "--enable-prompt-tokens-details"]
    argv += ["--kv-transfer-config", json.dumps(transfer)]
    argv += ["--distributed-executor-backend", "uni", "--host", "127.0.0.1", "--port", str(port)]
    env = ENGINE_ENV | {
        "VLLM_SERVER_DEV_MODE": "1",  # so that a test can reset prefix caches
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    return Server(id, argv, env, str(directory), f"http://127.0.0.1:{port}")


def fast_dtype() -> str:
    """What this CPU multiplies fast: without AVX-512, bfloat16 takes ten times as long."""
    has_avx512 = "avx512" in Path("/proc/cpuinfo").read_text()
    return "bfloat16" if has_avx512 else "float32"


def gateway(directory: Path, python: Path, package: Path, config: Path) -> Server:
    """The gateway on a free port, not started; ``package`` is the directory of its sources."""
    argv = [str(python), "-m", "hetero_gateway", "serve", "--port", "0", "-c", str(config)]
    return Server("gateway", argv, {"PYTHONPATH": str(package)}, str(directory))


def session_members(session: int) -> list[int]:
    """The living processes of a session, its leader included."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything; state, parent, group, session follow.
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and int(its_session) == session != 0:
                members.append(int(path.parent.name))
    return members


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def accepts_connections(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def http_status(url: str, timeout_s: float = 60.0) -> int:
    """The status of a GET; 0 when nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return int(error.code)
    except OSError:
        return 0


def wait_until(condition: Callable[[], bool], timeout_s: float, pause_s: float = 0.05) -> bool:
    """Ask until it holds; False when it does not within ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
    return True
