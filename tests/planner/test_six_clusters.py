"""Six clusters and six models: each ends with a plan or one clear reason."""

import itertools

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.plan_request import load_requests
from hetero_gateway.planner.search import search

CLUSTERS = {
    "1 H100": [("H100", 1, 1)],
    "2 L4": [("L4", 2, 1)],
    "4 A10G, 2 L4": [("A10G", 4, 1), ("L4", 2, 1)],
    "8 V100-16GB": [("V100-16GB", 8, 1)],
    "2 x 8 A100-40GB, 4 H100": [("A100-40GB", 8, 2), ("H100", 4, 1)],
    "4 RTX 4090, 2 RTX 3090": [("RTX4090", 4, 1), ("RTX3090", 2, 1)],
}
MODELS = (
    "Llama-3.1-8B", "Llama-3.3-70B", "Llama-3.3-70B-FP8", "Llama-3.3-70B-AWQ", "Qwen3-30B-A3B",
    "gpt-oss-20b",
)  # fmt: skip


@pytest.mark.system
@pytest.mark.parametrize(("cluster", "model"), list(itertools.product(CLUSTERS, MODELS)))
def test_a_plan_or_one_clear_reason(cluster, model, tmp_path):
    path = tmp_path / "plan.yaml"
    machines = [
        f"{{id: m{i}, accelerator: {card}, count: {count}, copies: {copies}}}"
        for i, (card, count, copies) in enumerate(CLUSTERS[cluster])
    ]
    path.write_text(f"model: {model}\nmax_model_len: 8192\nmachines: [{', '.join(machines)}]\n")
    question = load_requests(path)[0].question
    if not question.types:
        with pytest.raises(ConfigError, match=r"^the model fits no machine; nearest: .+: .+$"):
            search(question)
        return
    plan = search(question)
    assert plan.best.simulated is not None
    assert plan.best.simulated.tokens_per_s > 0
    assert any(plan.best.layouts.values())
