"""Lines of files of requests, and of answers."""

import json

import pytest

from hetero_gateway.files.batch_lines import (
    ENDPOINTS,
    BatchLine,
    LineProblem,
    answer_line,
    error_line,
    read_line,
    window_s,
)

CHAT = "/v1/chat/completions"


def text(**changes):
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}} | changes
    return json.dumps({name: value for name, value in line.items() if value is not None}).encode()


def test_a_line_is_read():
    line = read_line(text(extra=1), CHAT)
    assert isinstance(line, BatchLine)
    assert (line.custom_id, line.url, bytes(line.body)) == ("a", CHAT, b'{"model": "m"}')
    assert isinstance(read_line(text(method=None), None), BatchLine)


@pytest.mark.parametrize(
    ("data", "code", "word"),
    [
        (b"{", "invalid_json_line", "JSON"),
        (b"\xff", "invalid_json_line", "JSON"),
        (b"[1]", "invalid_json_line", "object"),
        (text(custom_id=None), "invalid_json_line", "custom_id"),
        (text(custom_id=7), "invalid_json_line", "custom_id"),
        (text(custom_id=""), "invalid_custom_id", "512"),
        (text(custom_id="x" * 513), "invalid_custom_id", "512"),
        (text(method="GET"), "invalid_method", "POST"),
        (text(url="/v1/embeddings"), "mismatched_endpoint", CHAT),
        (text(body=[]), "invalid_body", "object"),
        (b"[" * 100_000, "invalid_json_line", "JSON"),
    ],
)
def test_what_is_wrong_is_said(data, code, word):
    problem = read_line(data, CHAT)
    assert isinstance(problem, LineProblem)
    assert problem.code == code
    assert word in problem.message


def test_any_path_of_an_engine_is_served_but_forms_and_what_takes_no_step():
    assert {CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings"} <= set(ENDPOINTS)
    assert {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"} <= set(ENDPOINTS)
    assert "/tokenize" not in ENDPOINTS
    problem = read_line(text(url="/v1/audio/transcriptions"), None)
    assert isinstance(problem, LineProblem)
    assert problem.code == "invalid_url"


def test_no_problem_quotes_what_stands_in_a_body():
    secret = "s3cret"
    for bad in (text(custom_id=7, body={"x": secret}), b'{"body": {"x": "%b"' % secret.encode()):
        problem = read_line(bad, CHAT)
        assert isinstance(problem, LineProblem)
        assert secret not in problem.message


@pytest.mark.parametrize(
    ("window", "seconds"),
    [
        ("24h", 86400),
        ("1d12h", 129600),
        ("90min", 5400),
        ("0.5h", 1800),
        ("30s", 30),
        ("1w", 604800),
    ],
)
def test_windows(window, seconds):
    assert window_s(window) == seconds


@pytest.mark.parametrize("window", ["", "24", "h", "0s", "24h ", "-1h", "400d", "1e9h", "h24"])
def test_what_is_no_window(window):
    assert window_s(window) is None


def test_answers_are_one_line_each():
    spread = b'{\n "a":\r\n [1,\n 2]}'
    line = answer_line("b_1", "a", 200, "r", spread, repeated=False)
    assert line.count(b"\n") == 1
    told = json.loads(line)
    assert told["response"] == {"status_code": 200, "request_id": "r", "body": {"a": [1, 2]}}
    assert told["error"] is None
    assert "repeated" not in told
    html = json.loads(answer_line("b_1", "a", 502, "r", b"<html>\n\xff", repeated=True))
    assert html["response"]["body"] == "<html>\n\ufffd"
    assert html["repeated"] is True
    expired = json.loads(error_line("b_1", "a", "batch_expired", "too late"))
    assert expired["response"] is None
    assert expired["error"] == {"code": "batch_expired", "message": "too late"}
