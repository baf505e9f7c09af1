"""Transfers between emulated instances, measured as ``profile --pairs`` does it."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.cli import main, profile_pairs
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.pairs_file import read_pairs, write_pairs
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.emulator.transfer_settings import KVTransferSettings, read_config
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.profiler.pairs import MeasuredPair, document, link_of, measure_pairs
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.emulated import emulated

QUICK = Constants(p1=1e-5, p2=0, p3=0, p4=0.004, p5=0, p6=0, p7=0, p8=0.01)
TOKEN_BYTES = 131_072
GBIT, START_S = 8.0, 0.05


def settings(policy: str = "fail", **more: Any) -> EmulatorSettings:
    config = {"kv_connector": "NixlConnector", "kv_load_failure_policy": policy}
    return EmulatorSettings(
        Profile("GPU", "tiny", 1, QUICK, 40_000, 16),
        models=("m",),
        kv_transfer=KVTransferSettings(
            read_config(json.dumps(config)), gbit_per_s=GBIT, start_s=START_S
        ),
        **more,
    )


@asynccontextmanager
async def instances(*each: EmulatorSettings) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(emulated(one)) for one in each]
        yield [parse_target(url) for url, _ in found]


async def test_start_and_bandwidth_come_out_in_both_directions() -> None:
    async with instances(settings(), settings()) as targets:
        found = await measure_pairs(targets, passes=2)
    assert [(p.prefill, p.decode) for p in found] == [
        (targets[i].base_url, targets[1 - i].base_url) for i in range(2)
    ]
    for pair in found:
        assert pair.refused is None
        assert pair.start_s == pytest.approx(START_S, abs=0.01)
        assert pair.tokens_per_s == pytest.approx(GBIT * 1e9 / 8 / TOKEN_BYTES, rel=0.02)
        assert pair.gbit_per_s == pytest.approx(GBIT, rel=0.03)


@pytest.mark.parametrize(
    ("policy", "why"), [("fail", "answered 500"), ("recompute", "computed the prompts again")]
)
async def test_engines_that_refuse_each_other_are_no_pair(policy: str, why: str) -> None:
    async with instances(
        settings(policy), settings(policy, attention_backend="TRITON_ATTN")
    ) as targets:
        found = await measure_pairs(targets, passes=1)
    assert all(pair.start_s is None and why in (pair.refused or "") for pair in found)


async def test_a_context_that_is_too_short_says_so() -> None:
    async with instances(settings(max_model_len=512), settings()) as targets:
        with pytest.raises(ConfigError, match="prompts of 1024 tokens"):
            await measure_pairs(targets)


def test_a_line_that_would_begin_below_zero_goes_through_it() -> None:
    start_s, tokens_per_s = link_of((100, [0.05]), (800, [0.81]), 0.01)
    assert start_s == 0
    assert tokens_per_s == pytest.approx(1000)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    pairs = [
        MeasuredPair("http://a:1", "http://b:2", 0.0123456, 9537.0, 10.0),
        MeasuredPair("http://b:2", "http://a:1", refused="answered 500"),
    ]
    path = tmp_path / "pairs.yaml"
    write_pairs(path, document(pairs, "NixlConnector"))
    found = read_pairs(path)
    row = found.of(("x", "http://a:1/"), ("y", "http://B:2"))
    assert row is not None
    assert (row.start_s, row.tokens_per_s, row.refused) == (0.01235, 9537.0, None)
    other = found.of(("y", "http://b:2"), ("x", "http://a:1"))
    assert other is not None
    assert other.refused == "answered 500"
    assert found.of(("x", "http://c:1"), ("y", "http://b:2")) is None
    path.write_text("pairs: [{prefill: a, decode: b, start_s: 1}]")
    with pytest.raises(ConfigError, match="give start_s and tokens_per_s"):
        read_pairs(path)


def test_the_command_writes_the_file_and_says_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(targets: Any, *_: Any, **options: Any) -> list[MeasuredPair]:
        one, other = (target.base_url for target in targets)
        return [MeasuredPair(one, other, 0.004, 9537.0), MeasuredPair(other, one, refused="no")]

    monkeypatch.setattr(profile_pairs, "measure_pairs", measured)
    path = tmp_path / "pairs.yaml"
    words = ["profile", "http://a:1", "--pairs", "http://b:2", "-o", str(path)]
    assert main(words) == 0
    assert read_pairs(path).of(("", "http://a:1"), ("", "http://b:2")) is not None
    out = capsys.readouterr().out
    assert "9537" in out
    assert "scheduler.pairs_file" in out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][1]["refused"] == "no"
    assert main(["profile", "--pairs", "http://b:2", "-o", str(path)]) == 2
    assert main(["profile", "http://a:1", "--pairs", "http://a:1", "-o", str(path)]) == 2
    assert main([*words, "--resume"]) == 2
