"""Exact prompt lengths from a local tokenizer file."""

import asyncio
import json
import threading
import tracemalloc
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hetero_gateway.errors import ConfigError
from hetero_gateway.gateway.request.tokenizer import Tokenizer
from tests.fakes.gateway_files import clients
from tests.fakes.running import rig


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A tokenizer whose tokens are words."""
    library = Library(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    return path


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ("a b c", 3),
        (["a b", "c"], 3),
        ([{"role": "user", "content": "a b"}], 2 + 4 + 3),
        ([{"role": "user", "content": [{"type": "text", "text": "a b c"}]}], 3 + 4 + 3),
        ([{"role": "user", "content": None}], None),
        (5, None),
    ],
)
async def test_texts_are_counted(file: Path, value: object, tokens: int | None) -> None:
    assert await Tokenizer(file, 10**6).count(json.dumps(value).encode()) == tokens


@pytest.mark.parametrize("value", ["[]", "{}", '""', '{"content":[]}', '"a"', "[[]]", "0"])
async def test_a_prompt_of_too_many_values_is_estimated(file: Path, value: str) -> None:
    raw = b"[" + b",".join([value.encode()] * 500_000) + b"]"
    tracemalloc.start()
    counted = Tokenizer(file, 10**9)._count(raw)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counted is None
    assert most < 3 * len(raw) + 2_000_000


async def test_long_prompts_leave_the_event_loop_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(file, thread_above_bytes=100)
    threads: list[int] = []
    count = tokenizer._count

    def noted(raw: bytes) -> int | None:
        threads.append(threading.get_ident())
        return count(raw)

    monkeypatch.setattr(tokenizer, "_count", noted)
    long, short = json.dumps("a " * 1000).encode(), json.dumps("a").encode()
    assert await asyncio.gather(tokenizer.count(long), tokenizer.count(short)) == [1000, 1]
    assert [ident == threading.get_ident() for ident in threads].count(True) == 1


async def test_the_scheduler_sees_the_exact_length(file: Path) -> None:
    scheduler = {"tokens": {"tokenizer_file": str(file)}}
    async with rig(scheduler=scheduler) as (running, client, _):
        body = {"model": "m", "prompt": "a " * 77}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        placed = next(running.gateway.dataplane.decisions.newest_first()).decision
        assert placed.request.prompt_tokens == 77


async def test_a_request_that_is_refused_once_it_is_counted_is_no_bug(
    file: Path, tmp_path: Path
) -> None:
    scheduler = {"tokens": {"tokenizer_file": str(file)}}
    keys = clients(tmp_path, a={"models": ["other"]})
    async with rig(scheduler=scheduler, clients=keys) as (_, client, _):
        client.headers["authorization"] = "Bearer ka"
        for repeats in (77, 200_000):  # read at once, and in steps
            body = {"model": "m", "prompt": "a " * repeats}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "model_not_allowed"


def test_a_missing_or_broken_file_is_a_configuration_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for path in (tmp_path / "none.json", broken):
        with pytest.raises(ConfigError, match=r"tokenizer_file: .*\.json"):
            Tokenizer(path, 100)
