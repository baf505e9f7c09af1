"""Times of a batch, from streams written by hand."""

import pytest

from hetero_gateway.lab.load.client import Reply
from hetero_gateway.lab.profiler.tracks import Track, read_batch, track


def steady(first_s: float, tokens: int) -> Track:
    """A sequence with a token in every step."""
    times = tuple(first_s + i * 0.1 for i in range(tokens))
    return Track(times, tuple(range(1, tokens + 1)), 100)


def event(text: str = "x", tokens: int | None = None) -> bytes:
    usage = "" if tokens is None else f',"usage":{{"prompt_tokens":7,"completion_tokens":{tokens}}}'
    return f'data: {{"choices":[{{"index":0,"text":"{text}"}}]{usage}}}\n\n'.encode()


def closing(tokens: int) -> bytes:
    usage = f'"usage":{{"prompt_tokens":7,"completion_tokens":{tokens}}}'
    return f'data: {{"choices":[],{usage}}}\n\ndata: [DONE]\n\n'.encode()


def reply(*parts: tuple[float, bytes]) -> Reply:
    return Reply(0.0, status=200, tail=b"".join(p for _, p in parts), parts=list(parts))


def test_a_batch_that_starts_together_is_measured_over_all_its_steps():
    reading = read_batch([steady(1.0, 11), steady(1.0, 11)], start_s=0.4)
    assert reading.whole.prefill_s == pytest.approx(0.6)
    assert (reading.together, reading.equal) == (True, True)
    assert (reading.decode.prompt_tokens, reading.decode.output_tokens) == (100, 11)
    assert reading.decode.decode_s == pytest.approx(1.0)


def test_a_late_starter_ends_the_prefill_and_shortens_the_window():
    reading = read_batch([steady(1.0, 11), steady(1.3, 11)], start_s=0.5)
    assert not reading.together
    assert reading.whole.prefill_s == pytest.approx(0.8)
    # The early one has 4 tokens when the late one has its first, and 7 to go.
    assert reading.decode.steps == 7
    assert reading.decode.decode_s == pytest.approx(0.7)
    # Cached at the start: 100 + 4 and 100 + 1; the first step of a sample is over prompt + 1.
    assert reading.decode.prompt_tokens == pytest.approx(101.5)


def test_tokens_of_one_step_that_arrive_a_little_apart_are_still_one_step():
    early, late = steady(1.0, 11), steady(1.03, 11)
    assert read_batch([early, late], 0.5).together
    # Nor does one hiccup of the machine make a batch ragged.
    hiccup = Track((1.08, *early.times_s[1:]), early.tokens, 100)
    assert read_batch([early, hiccup], 0.5).together


def test_sequences_that_follow_each_other_never_ran_together():
    reading = read_batch([steady(1.0, 5), steady(2.0, 5)], 0.5)
    assert (reading.decode, reading.most_running) == (None, 1)


def test_one_token_each_has_no_decode_part():
    reading = read_batch([steady(1.0, 1), steady(1.0, 1)], 0.5)
    assert (reading.decode, reading.whole.prefill_s) == (None, pytest.approx(0.5))


def test_unequal_lengths_are_noticed():
    assert not read_batch([steady(1.0, 5), steady(1.0, 6)], 0.5).equal


CUT = event("a", 12)
TOLD = '\\"choices\\":[{\\"completion_tokens\\": 99'


@pytest.mark.parametrize(
    ("parts", "times_s", "tokens"),
    [
        pytest.param(
            [(1.0, event("a", 1)), (2.0, event("bc", 3)), (3.0, closing(3))], (1.0, 2.0), (1, 3),
            id="the stream's own counts see through merged deltas",
        ),
        pytest.param(
            [(1.0, event()), (2.0, event("") + event()), (3.0, closing(3))], (1.0, 2.0), (1, 3),
            id="without counts every delta is a token, an empty one too",
        ),
        pytest.param(
            [*((i, event()) for i in range(1, 6)), (6, closing(10))], (1, 2, 3, 4, 5),
            (2, 4, 6, 8, 10),
            id="without counts the closing usage makes up for merged deltas",
        ),
        pytest.param(
            [(1.0, CUT[:-8]), (2.0, CUT[-8:]), (3.0, closing(12))], (2.0,), (12,),
            id="an event cut in two counts when it is whole",
        ),
        pytest.param(
            [(1.0, event(TOLD, 1)), (2.0, event("b", 2)), (3.0, closing(2))], (1.0, 2.0), (1, 2),
            id="text that looks like a count is text",
        ),
    ],
)  # fmt: skip
def test_tokens_are_counted_as_they_come(parts, times_s, tokens):
    assert track(reply(*parts), 7) == Track(times_s, tokens, 7)


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ([(1.0, event("a", 1))], "incomplete"),
        ([(1.0, b'data: {"error":{"code":500}}\n\ndata: [DONE]\n\n')], "stream_error"),
        ([(1.0, b"data: [DONE]\n\n")], "no tokens"),
    ],
)
def test_a_stream_that_broke_has_no_times(parts, failure):
    assert track(reply(*parts), 7) == failure
