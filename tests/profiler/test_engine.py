"""What is read from an engine's /metrics."""

from hetero_gateway.profiler.engine import parse_cache, parse_counters

REAL = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 1.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1.5e+06
vllm:prompt_tokens_cached_total{engine="0",model_name="tiny"} 7.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 50.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 16.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",\
gpu_memory_utilization="0.92",kv_cache_size_tokens="524288",num_gpu_blocks="4096"} 1.0
"""


def test_the_series_of_a_real_engine_are_found_and_their_cousins_are_not():
    counters = parse_counters(REAL)
    assert (counters.running, counters.waiting, counters.preemptions) == (2, 1, 3)
    assert (counters.prompt_tokens, counters.generation_tokens) == (1.5e6, 50)
    assert counters.prefix_cache_hits == 16


def test_ranks_of_one_engine_are_added():
    both = REAL + REAL.replace('engine="0"', 'engine="1"')
    assert parse_counters(both).running == 4
    assert parse_cache(both)[:2] == (2 * 524288, 128)


def test_capacity_is_as_told_or_blocks_times_their_size():
    assert parse_cache(REAL) == (524288, 128, 0.92, "auto")
    assert parse_cache(REAL.replace("kv_cache_size_tokens", "other"))[:2] == (4096 * 128, 128)
    assert parse_cache("") == (None, None, None, None)


def test_what_is_not_exported_is_none_not_zero():
    assert parse_counters("vllm:num_requests_running 0.0\n").running == 0
    assert parse_counters("up 1\n").preemptions is None
