"""Files of keys, and configurations of clients, that anything may stand in.

Each loads, or is one ``ConfigError`` whose lines can be read; never a traceback, and in bounded
time and memory, whatever an input of this size asks for.
"""

import os
import random
import resource
import tempfile
from pathlib import Path
from time import process_time  # the real one, in virtual time too
from unittest.mock import patch

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.client_keys import KeysFile, parse_keys, read_clients, read_keys
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.gateway.admission.clients import Admission
from tests.fuzz.fuzzing import Findings
from tests.fuzz.mutation import mutated_bytes, mutated_json

_ENV = "FUZZED_KEYS"
# Of one input of at most 64 KB; a machine may be busy, so that CPU time is what is bounded.
_MOST_INPUT_BYTES = 1 << 16
_MOST_CPU_S = 10.0
_MOST_MEMORY_BYTES = 300 * 2**20
# Of an error, with its twenty problems.
_LONGEST_LINE = 8000
_KINDS = ("file", "environment", "clients", "section")

_HASH = "sha256:" + "ab" * 32
_CORPUS = (
    """\
groups:
  team-a: {tokens_per_minute: 200000, models: [llama-3-8b], classes: [interactive, batch]}
  team-b: {share: 2.5, class: batch}
keys:
  - {name: alice, hash: "HASH0", group: team-a, requests_per_minute: 60}
  - {name: bob, hash: "HASH1", expires: 2030-01-01, concurrency: 3}
  - name: carol
    hash: HASH2
    expires: 2030-01-01T12:00:00+02:00
    models: [a, b]
""",
    "keys:\n" + "".join(f'  - {{name: k{n}, hash: "HASH{n}"}}\n' for n in range(50)),
    '{"keys": [{"name": "a", "hash": "HASH0", "share": 1.5}], "groups": {"g": {}}}',
    "keys: []\n",
)
_PIECES = (
    "&a ", "*a", "*a\n", "!!bool x", "!!int x", "!!int ''", "!!timestamp x", "!!float x",
    "!!null x", "!!binary x", "!!set {a, b}", "!!omap [a: b]", "!!pairs [a: b]",
    "!!python/object:os.system x", "!x y", "!!str 1", "!!map [a]", "!!seq {a: b}", "<<: *a",
    "<<: {a: b}", "? [a, b]\n: c", "? ", "- ", ": ", "---\n", "...\n", "%YAML 9.9\n---\n",
    "%TAG ! x\n---\n", "|\n  text\n", ">-\n  text\n", "\t", "\0", "\x1b[31m", "\ufeff",
    "\u2028", "\x85", "\ud7ff", "'", '"', '"\\ud800"', '"\\u0000"', "${HOME}",
    "${NOT_SET_ANYWHERE}", "${", "$${HOME}", "1e400", "-1", ".inf", ".nan", "0x" + "f" * 5000,
    "0b" + "1" * 20000, "1:" * 3000 + "1", "9" * 5000, "1_0", "0o17", "~", "null", "yes",
    "2001-99-99", "2001-01-01T99:99:99", "9999-12-31T23:59:59.999999999-23:59", "0001-01-01",
    "[" * 500, "{a: " * 500, "[" * 3000 + "]" * 3000, "- " * 2000 + "a", "x" * 20000,
    "a: 1\na: 2\n", "k: &x [1, 2]\nl: *x\n", "a: &a\n  b: *a\n",
)  # fmt: skip


def _bomb(rng: random.Random) -> str:
    """Aliases of aliases: a few lines that stand for a very great many values."""
    depth, width = rng.randrange(2, 12), rng.randrange(2, 12)
    lines = ["l0: &l0 [" + ", ".join(["x"] * width) + "]"]
    for number in range(1, depth):
        inner = ", ".join([f"*l{number - 1}"] * width)
        lines.append(f"l{number}: &l{number} [{inner}]")
    where = rng.choice(("keys: *l{}", "groups: {{g: {{models: *l{}}}}}", "keys: [{{name: *l{}}}]"))
    return "\n".join([*lines, where.format(depth - 1)]) + "\n"


def mutated_text(rng: random.Random) -> str:
    """A file of keys of which something is odd."""
    text = rng.choice(_CORPUS)
    for number in range(50):
        text = text.replace(f'HASH{number}"', f'{_HASH[:-2]}{number:02x}"', 1)
    kind = rng.random()
    if kind < 0.02:
        return text
    if kind < 0.04:
        return _bomb(rng)
    if kind < 0.3:
        document = {
            "keys": [{"name": "a", "hash": _HASH, "expires": "2030-01-01"}],
            "groups": {"g": {"models": ["m"], "share": 1}},
        }
        return mutated_json(rng, document).decode("utf-8", "surrogateescape")
    if kind < 0.45:
        return mutated_bytes(rng, text.encode()).decode("utf-8", "surrogateescape")
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(text) + 1)
        # At the beginning of a line or of a value as often as anywhere.
        if rng.random() < 0.6:
            at = max(text.rfind(mark, 0, at) + len(mark) for mark in ("\n", ": ", "[", "- "))
        to = at + (rng.randrange(20) if rng.random() < 0.4 else 0)
        text = text[:at] + rng.choice(_PIECES) + text[to:]
    return text


def _load(kind: str, path: Path, data: bytes) -> KeysFile | None:
    """By one of the ways in which keys come; None: a configuration without keys."""
    if kind == "file":
        path.write_bytes(data)
        return read_keys(path)
    if kind == "environment":
        text = data.replace(b"\0", b"").decode("utf-8", "surrogateescape")
        return parse_keys(text, "clients.keys_env: X")
    if kind == "clients":
        path.write_bytes(data)
        config = path.with_name("gateway.yaml")
        config.write_text(f"clients: {{keys_file: {path.name}, groups: {{g: {{share: 2}}}}}}\n")
        return read_clients(load_gateway_config(config).clients, path.parent)
    config = path.with_name("gateway.yaml")
    # The text as the section itself.
    lines = data.decode("utf-8", "surrogateescape").splitlines(keepends=True)
    text = "clients:\n" + "".join("  " + line for line in lines)
    config.write_bytes(text.encode("utf-8", "surrogateescape"))
    load_gateway_config(config)
    return None


async def fuzz_keys(seed: int, count: int) -> Findings:
    """``count`` texts, each by one of the ways; 200: it loads, 400: it is refused in words."""
    findings, rng = Findings(), random.Random(seed)
    with tempfile.TemporaryDirectory() as directory, patch.dict(os.environ, {_ENV: "x"}):
        path = Path(directory) / "keys.yaml"
        for _ in range(count):
            data = mutated_text(rng).encode("utf-8", "surrogateescape")[:_MOST_INPUT_BYTES]
            _one(rng.choice(_KINDS), path, data, findings)
    return findings


def _one(kind: str, path: Path, data: bytes, findings: Findings) -> None:
    findings.sent += 1
    before_bytes, begun_s = _peak_bytes(), process_time()
    try:
        keys = _load(kind, path, data)
        if keys is not None:
            Admission(None, keys, "secret")
        findings.statuses[200] += 1
    except ConfigError as error:
        findings.statuses[400] += 1
        for line in error.args:
            if not isinstance(line, str) or not line.isprintable() or len(line) > _LONGEST_LINE:
                findings.add(f"by {kind}: an odd line {str(line)[:300]!r}", data)
        if not error.args:
            findings.add(f"by {kind}: an error without words", data)
    except Exception as error:  # what the fuzzer is for
        findings.add(f"by {kind}: {type(error).__name__}: {error}"[:500], data)
    took_s = process_time() - begun_s
    grew_bytes = _peak_bytes() - before_bytes
    if took_s > _MOST_CPU_S:
        findings.add(f"by {kind}: {took_s:.1f} s of CPU", data)
    if grew_bytes > _MOST_MEMORY_BYTES:
        findings.add(f"by {kind}: {grew_bytes / 1e6:.0f} MB", data)


def _peak_bytes() -> int:
    """The most memory that this process ever had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
