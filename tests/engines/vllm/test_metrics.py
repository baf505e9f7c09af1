"""What is read from vLLM's /metrics, in the form that vLLM 0.32 gives it, and in others."""

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.engines.vllm import (
    CacheFacts,
    EngineMetrics,
    metrics_of,
    of_place,
    read_metrics,
    samples_in,
)

REAL = """\
# HELP python_info Python platform information
python_info{implementation="CPython",major="3"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 64.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7951940394960315e+09
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 16.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 9.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1.5e+06
vllm:prompt_tokens_cached_total{engine="0",model_name="tiny"} 7.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 50.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",enable_prefix_caching="True",\
engine="0",gpu_memory_utilization="0.92",kv_cache_dtype_skip_layers="[]",\
kv_cache_size_tokens="524288",num_cpu_blocks="None",num_gpu_blocks="4096",\
num_gpu_blocks_override="None",prefix_caching_hash_algo="sha256"} 1.0
"""
# As vLLM before 0.11 named them.
OLDER = """\
vllm:gpu_cache_usage_perc{model_name="tiny"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="tiny"} 8.0
vllm:gpu_prefix_cache_hits_total{model_name="tiny"} 4.0
"""


def rank(number: int, usage: float, tokens: int) -> str:
    return (
        f'vllm:kv_cache_usage_perc{{engine="{number}",model_name="m"}} {usage}\n'
        f'vllm:cache_config_info{{engine="{number}",kv_cache_size_tokens="{tokens}"}} 1.0\n'
    )


def test_the_series_of_a_real_engine_are_found_and_their_cousins_are_not() -> None:
    assert read_metrics(REAL) == EngineMetrics(
        running=2,
        waiting=1,
        preemptions=3,
        prompt_tokens=1.5e6,
        generation_tokens=50,
        prefix_cache_hits=16,
        prefix_cache_queries=64,
        kv_usage=0.25,
        cache=CacheFacts(524288, 128, 0.92, "auto", True),
    )


def test_ranks_of_one_engine_are_added() -> None:
    both = read_metrics(REAL + REAL.replace('engine="0"', 'engine="1"'))
    assert (both.running, both.waiting, both.prefix_cache_hits) == (4, 2, 32)
    assert (both.cache.capacity_tokens, both.cache.block_tokens) == (2 * 524288, 128)
    assert both.kv_usage == 0.25


def test_of_ranks_that_are_a_place_each_every_one_has_its_own() -> None:
    """By their position: a server that has but a part of them counts them as its cluster does."""
    other = REAL.replace('engine="0"', 'engine="1"').replace("524288", "1024")
    text = f"process_start_time_seconds 1700000000.5\n{REAL}{other}"
    for part in (
        text,
        text.replace('engine="1"', 'engine="5"').replace('engine="0"', 'engine="4"'),
    ):
        samples = samples_in(part)
        first, second, none = (metrics_of(of_place(samples, place)) for place in range(3))
        assert dataclasses.replace(first, started_s=None) == read_metrics(REAL)
        assert (second.running, second.cache.capacity_tokens) == (2, 1024)
        assert first.started_s == second.started_s == 1700000000.5
        assert none.running is None


def test_usage_over_ranks_is_the_used_share_of_the_whole_cache() -> None:
    assert read_metrics(rank(0, 1.0, 100) + rank(1, 0.2, 300)).kv_usage == pytest.approx(0.4)
    # In any order; and each rank alike where one does not say how large it is.
    usages = 'vllm:kv_cache_usage_perc{engine="2",model_name="m"} 0.6\n'
    text = rank(1, 0.2, 300) + usages + rank(0, 1.0, 100)
    assert read_metrics(text).kv_usage == pytest.approx(0.6)


def test_capacity_is_as_told_or_blocks_times_their_size() -> None:
    untold = read_metrics(REAL.replace("kv_cache_size_tokens", "other")).cache
    assert untold.capacity_tokens == 4096 * 128
    assert read_metrics("").cache == CacheFacts()
    # A number of blocks of no known size is no capacity, nor is what is no number.
    assert read_metrics('vllm:cache_config_info{num_gpu_blocks="7"} 1\n') == EngineMetrics()
    assert read_metrics('vllm:cache_config_info{kv_cache_size_tokens="None"} 1') == EngineMetrics()


def test_older_names_are_read_where_the_new_ones_are_missing() -> None:
    older = read_metrics(OLDER)
    assert (older.kv_usage, older.prefix_cache_queries, older.prefix_cache_hits) == (0.5, 8, 4)
    both = read_metrics(REAL + OLDER)
    assert both == read_metrics(REAL)


def test_whether_prefixes_are_cached_is_told_or_not_known() -> None:
    for text, known in (("True", True), ("False", False), ("None", None)):
        line = f'vllm:cache_config_info{{enable_prefix_caching="{text}"}} 1.0'
        assert read_metrics(line).cache.prefix_caching is known


STATES = "".join(
    f'vllm:engine_sleep_state{{engine="0",sleep_state="{state}"}} %s\n'
    for state in ("awake", "weights_offloaded", "discard_all")
)


def test_when_it_started_and_whether_it_sleeps_are_told_or_not_known() -> None:
    start = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.79519e+09\n"
    assert read_metrics(REAL + start + "python_info 1\n").started_s == 1.79519e9
    assert read_metrics(start + "vllm:num_requests_running 1\n").running == 1
    for odd in ("x\n", "9" * 400, ""):
        assert read_metrics("process_start_time_seconds " + odd).started_s is None
    told = [read_metrics(STATES % state).asleep for state in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert told == [False, True, True]
    assert read_metrics(REAL).asleep is None


def test_what_is_not_exported_is_none_not_zero() -> None:
    assert read_metrics("vllm:num_requests_running 0.0\n").running == 0
    assert read_metrics("up 1\n") == EngineMetrics()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e999", "many", "0x10"])
def test_what_is_no_usable_number_is_not_told(value: str) -> None:
    text = f'vllm:kv_cache_usage_perc{{engine="0"}} {value}\nvllm:num_requests_running {value}\n'
    assert read_metrics(text) == EngineMetrics()


def test_labels_may_hold_what_ends_labels_elsewhere() -> None:
    text = 'vllm:num_requests_running{engine="0",model_name="a\\"} 9 b}"} 2.0 1795194305000\n'
    assert read_metrics(text).running == 2


PIECES = (
    *("vllm:kv_cache_usage_perc", "vllm:cache_config_info", "vllm:num_requests_running"),
    *('{engine="0"}', '{kv_cache_size_tokens="3"}', 'num_gpu_blocks="'),
    *("{", "}", '"', "\\", "=", ",", " ", "1", "NaN", "1e308", "9" * 4301, "\r", "\u2028"),
)
LINE = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join)
LINES = st.lists(LINE).map("\n".join)


@given(LINES)
def test_no_text_is_too_odd_to_be_read(text: str) -> None:
    read = read_metrics(text)
    assert read.kv_usage is None or 0 <= read.kv_usage <= 1
    assert read.cache.capacity_tokens is None or read.cache.capacity_tokens > 0


@pytest.mark.parametrize(
    "piece",
    [" ", "a", '"', '"\\', 'a="b",', "{", "\n", "\nvllm:", "\nvllm:cache_config_info{a="],
)
def test_hostile_text_takes_no_more_time_for_each_byte_than_a_short_one(piece: str) -> None:
    def cpu_s(repeats: int) -> float:
        text = "vllm:cache_config_info{" + piece * repeats
        started_s = time.process_time()
        read_metrics(text + "} 1\n")
        read_metrics("vllm:num_requests_running" + piece * repeats)
        return time.process_time() - started_s

    # Sixteen times the text; quadratic time would be 256 times as long.
    short_s, long_s = min(cpu_s(4_000) for _ in range(5)), min(cpu_s(64_000) for _ in range(3))
    assert long_s < 64 * max(short_s, 5e-4)
