"""A policy of an installed package: found by its entry point, served with, simulated, explained."""

import json
import re
from pathlib import Path

import pytest

from hetero_gateway.cli import main
from hetero_gateway.core.policies import Policy
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.policies import installed_policy
from tests.fakes.running import CHAT, chat, rig

DOCUMENT = Path(__file__).parents[2] / "docs" / "design" / "scheduling.md"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution on the path, as pip leaves it there."""
    site = tmp_path / "site"
    info = site / "fewest_tokens-1.0.dist-info"
    info.mkdir(parents=True)
    (module,) = re.findall(
        r"```python\n([^`]*class FewestTokens.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL
    )
    (site / "fewest_tokens.py").write_text(module)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fewest-tokens\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hetero_gateway.policies]\n"
        "fewest-tokens = fewest_tokens:FewestTokens\n"
        "no-policy = builtins:dict\n"
        "missing = fewest_tokens:Missing\n"
    )
    monkeypatch.syspath_prepend(str(site))


async def test_requests_go_where_an_installed_policy_says() -> None:
    options = {"policy": "fewest-tokens", "policy_options": {"avoid": "i0"}}
    async with rig(2, scheduler=options) as (running, client, _):
        for _ in range(5):
            response = await client.post(CHAT, json=chat())
            assert response.headers["x-hetero-gateway-instance"] == "i1"
        (decision, *_) = running.gateway.dataplane.decisions.newest_first()
    assert decision.decision.policy.name == "fewest-tokens"
    assert "by fewest-tokens its score was" in decision.decision.reason()


def test_it_is_simulated_beside_the_built_in_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Path(__file__).parents[2] / "configs" / "clusters" / "paper-a.yaml"
    words = ["--policy", "fewest-tokens,round-robin", "--count", "200", "--seeds", "1", "--json"]
    assert main(["simulate", "-c", str(cluster), *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {cell["policy"] for cell in document["results"]} == {"fewest-tokens", "round-robin"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", r"policy missing \(fewest_tokens:Missing\) cannot be made: AttributeError"),
        ("no-policy", "is no policy: it lacks choose"),
        ("other", "no package has installed a policy 'other'"),
    ],
)
def test_what_is_no_policy_is_one_clear_line(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        installed_policy(name, {})


def test_an_installed_policy_goes_by_its_entry_points_name() -> None:
    policy: Policy = installed_policy("fewest-tokens", {})
    assert policy.name == "fewest-tokens"
    assert not policy.queues
