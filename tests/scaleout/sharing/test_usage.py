"""What clients of all gateways have used, in a real Redis."""

from pathlib import Path

import pytest
import redis

from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.gateway.admission.usage import UsageStoreError
from hetero_gateway.scaleout.sharing.usage import SharedUsage
from tests.fakes.redis import RedisServer
from tests.serve.test_usage import A, C, check_store, today, used

pytestmark = pytest.mark.system


@pytest.fixture
def anyio_backend() -> str:
    """Wall clock: the server is a process."""
    return "asyncio"


async def test_rows_of_each_run_are_kept_and_what_is_none_of_ours_counts_for_nothing(
    tmp_path: Path, server: RedisServer
) -> None:
    sharing = {"timeout_s": 5}
    config = SchedulerConfig.model_validate({"shared": server.url, "sharing": sharing})
    await check_store(lambda run: SharedUsage(config, tmp_path, run))
    key = f"{{hetero-gateway}}:usage:{today()}"
    with redis.Redis(port=server.port) as client:
        assert 30 * 86400 < client.ttl(key) <= 32 * 86400
        store = SharedUsage(config, tmp_path, C)
        before = await used(store)
        for field, value in (("x", "1"), (f"{A}\0b\0m", "many"), (f"{A}\0b\0m\0", "1,2,3,4")):
            client.hset(key, field, value)
        assert await used(store) == before
        client.set(f"{{hetero-gateway}}:usage:{today() - 2}", "no table")
        with pytest.raises(UsageStoreError, match=r"scheduler\.shared: .*WRONGTYPE"):
            await used(store)
        store.close()
