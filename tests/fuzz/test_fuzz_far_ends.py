"""Short seeded runs against what API servers, Redis and files of keys say; scripts/fuzz has more.

What they wait for is not all in the event loop: this is real time.
"""

import pytest

from hetero_gateway.core.prefixes.engine_blocks import EngineBlocks
from hetero_gateway.core.sharing.belief import Belief
from hetero_gateway.files.client_keys import KeyConfig
from hetero_gateway.gateway.fleet.sources.kubernetes_objects import ObjectReader
from tests.fuzz.cache_news import fuzz_cache_news
from tests.fuzz.key_files import fuzz_keys
from tests.fuzz.kubernetes import fuzz_kubernetes
from tests.fuzz.redis_rows import fuzz_redis
from tests.fuzz.test_fuzz import broken, notices, run

pytestmark = pytest.mark.slow


async def test_no_file_of_keys_is_anything_but_read_or_refused_in_words() -> None:
    await run(fuzz_keys, 60, s200=1, s400=35)


async def test_no_reply_or_row_of_redis_costs_more_than_the_view_of_others() -> None:
    await run(fuzz_redis, 300, s200=10, s400=5, s503=10)


async def test_whatever_an_api_server_says_the_next_good_list_is_read() -> None:
    await run(fuzz_kubernetes, 800, s400=10)


async def test_whatever_is_told_of_caches_costs_no_more_than_what_is_known_of_one() -> None:
    await run(fuzz_cache_news, 500, s200=10, s400=50)


@pytest.mark.system
async def test_a_fuzzer_notices_what_is_spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyConfig, "digest", property(broken))
    await notices(fuzz_keys, 100, "ArithmeticError")
    monkeypatch.setattr(Belief, "believed", lambda _, rows, doubted: rows)
    await notices(fuzz_redis, 400, "more than two engines hold")
    monkeypatch.setattr(EngineBlocks, "removed", broken)
    await notices(fuzz_cache_news, 200, "ArithmeticError")
    monkeypatch.setattr(ObjectReader, "event", broken)
    await notices(fuzz_kubernetes, 100, "spoilt on purpose")
