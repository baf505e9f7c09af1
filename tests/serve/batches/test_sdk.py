"""The flow of OpenAI's SDK, unchanged."""

from tests.fakes.running import CHAT
from tests.serve.batches.rigs import batch_rig, line


async def test_files_go_up_and_batches_come_back(tmp_path):
    async with batch_rig(tmp_path / "batches") as there:
        batch = await there.start([line(i) for i in range(40)])
        assert batch.object == "batch"
        ended = await there.ended(batch.id)
        assert ended.status == "completed"
        assert ended.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
        answers = await there.lines_of(ended.output_file_id)
        assert sorted(a["custom_id"] for a in answers) == sorted(f"c{i}" for i in range(40))
        assert all(a["response"]["status_code"] == 200 for a in answers)
        assert ended.error_file_id is None
