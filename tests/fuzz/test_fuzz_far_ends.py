"""Short seeded runs against what instances and API servers answer; scripts/fuzz has longer ones."""

from __future__ import annotations

import pytest

from hetero_gateway.gateway.fleet.sources.kubernetes_objects import ObjectReader
from hetero_gateway.http.response import ChunkedBody
from tests.fuzz.answers import fuzz_answers
from tests.fuzz.kubernetes import fuzz_kubernetes
from tests.fuzz.test_fuzz import assert_none


async def test_whatever_an_instance_answers_its_client_gets_http_and_the_next_is_served() -> None:
    findings = await fuzz_answers(seed=1, count=400)
    assert_none(findings)
    assert findings.statuses[200] > 50
    assert findings.statuses[502] > 50


async def test_whatever_an_api_server_says_the_next_good_list_is_read() -> None:
    findings = await fuzz_kubernetes(seed=1, count=1500)
    assert_none(findings)
    assert findings.statuses[400] > 20


async def test_an_answer_that_breaks_the_gateway_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = ChunkedBody.feed

    def spoilt(self: ChunkedBody, data: bytes) -> bytes:
        return feed(self, data).replace(b"\r\n", b"\n", 1)

    monkeypatch.setattr(ChunkedBody, "feed", spoilt)
    findings = await fuzz_answers(seed=1, count=60)
    assert any("not HTTP" in text for text, _ in findings.violations)


async def test_a_document_that_breaks_the_source_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: ObjectReader, line: bytes) -> None:
        raise ArithmeticError("spoilt on purpose")

    monkeypatch.setattr(ObjectReader, "event", broken)
    findings = await fuzz_kubernetes(seed=1, count=100)
    assert any("spoilt on purpose" in text for text, _ in findings.violations)
