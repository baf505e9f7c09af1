"""What operators see of batches, and what is configured."""

import asyncio
import re

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from tests.fakes.running import counted, eventually
from tests.serve.batches.rigs import batch_rig, line


async def test_metrics_the_board_and_alarms(tmp_path):
    async with batch_rig(tmp_path / "batches") as there:
        slow = [line(i, fake={"first_delay_s": 20}) for i in range(1200)]
        batch = await there.start(slow, window="30s")
        await eventually(lambda: there.runner.answered["completed"] > 0)
        await asyncio.sleep(5)
        batches = there.rig.running.gateway.batches
        (shown,) = batches.describe()
        assert (shown["id"], shown["lines"], shown["failed"]) == (batch.id, 1200, 0)
        assert shown["done"] > 0
        assert set(shown["out"]) == {"i0", "i1"}
        assert shown["late"]
        assert shown["predicted_end"] > shown["expires"]
        assert list(batches.alarms()) == [("warning", f"{batch.id} will not be done in time.")]
        told = await there.openai.batches.retrieve(batch.id)
        assert (told.late, told.predicted_end_at) == (
            True,
            pytest.approx(shown["predicted_end"], 2),
        )
        text = await there.rig.running.metrics()
        assert re.search(r"^hetero_gateway_batches_late 1\.0$", text, re.MULTILINE)
        assert counted(text, "batch_lines_done_total") == sum(there.runner.answered.values())
        assert counted(text, "batch_lines_out") == there.runner.choice.out.total()
        head = there.rig.running.gateway.board._head_of()
        assert head["batches"] == batches.describe()
        assert f"{batch.id} will not be done in time." in [a["text"] for a in head["alarms"]]
        await there.openai.batches.cancel(batch.id)
        await there.ended(batch.id)


async def test_nothing_of_a_body_is_in_a_log(tmp_path, caplog):
    caplog.set_level("DEBUG")
    async with batch_rig(tmp_path / "batches", 1) as there:
        secret = "s3cret-0f-a-cl1ent"
        bad = {"custom_id": 7, "body": secret}
        await there.ended((await there.start([line(0, secret), bad])).id)
        broken = {"status": 400, "body": f'{{"error": {{"message": "{secret}"}}}}'}
        await there.ended((await there.start([line(0, secret, fake=broken)])).id)
    assert secret not in "".join(
        record.getMessage() for record in caplog.records if record.name.startswith("hetero")
    )


def test_without_a_directory_there_is_nothing():
    assert GatewayConfig().batches.directory is None


def test_another_policy_has_no_batches(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text("scheduler: {policy: min-max}\nbatches: {directory: b}\n")
    with pytest.raises(ConfigError, match=r":2: batches\.directory: .*finish-time"):
        load_gateway_config(path)
