"""Predictors by configuration: trained ones, and a really installed package's own."""

import json
import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.cli import main
from hetero_gateway.core.lengths.length_model import ANY_MODEL, Leaf, LengthModel, Split
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    ConstantPredictor,
    LengthFeatures,
)
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.length_model_file import write_length_model
from hetero_gateway.files.yaml_file import parse_model
from hetero_gateway.gateway.dataplane import predictor as predictors
from hetero_gateway.gateway.dataplane.predictor import GuardedPredictor, make_predictor
from tests.fakes.predictor_package import install_predictors
from tests.fakes.running import CHAT, chat, rig

PROMPT = "seven words that nobody else may read"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_predictors(tmp_path_factory.mktemp("predictors"))


@pytest.fixture
def on_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))


def configured(**settings: Any) -> GatewayConfig:
    return GatewayConfig.model_validate({"scheduler": {"predictor": settings}})


# Installed packages


@pytest.mark.usefixtures("on_path")
async def test_an_installed_predictor_reads_the_prompt_and_is_told_the_true_length() -> None:
    settings = {"predictor": {"kind": "words", "options": {"tokens_per_word": 3}}}
    async with rig(scheduler=settings) as (running, client, _):
        answer = await client.post(CHAT, json=chat(PROMPT))
        decisions = (await client.get("/admin/decisions")).json()["decisions"]
        assert decisions[0]["predicted_output_tokens"] == 1 + 3 * 7
        running.gateway.metrics.catch_up()
        await client.post(CHAT, json=chat(PROMPT))
        again = (await client.get("/admin/decisions")).json()["decisions"]
        # It learnt a hundredth of the way to what the first one had.
        output = answer.json()["usage"]["completion_tokens"]
        assert again[0]["predicted_output_tokens"] == pytest.approx(
            1 + 7 * (3 + 0.01 * (output / 7 - 3))
        )
        limited = await client.post(CHAT, json=chat(PROMPT, max_tokens=4))
        assert limited.status_code == 200
        capped = (await client.get("/admin/decisions")).json()["decisions"]
        assert capped[0]["predicted_output_tokens"] == 4


@pytest.mark.usefixtures("on_path")
async def test_one_that_raises_fails_no_request_and_its_prompt_stays_out_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"predictor": {"kind": "raising", "mean_tokens": 123}}
    async with rig(scheduler=settings) as (running, client, _):
        with caplog.at_level(logging.WARNING):
            answers = [await client.post(CHAT, json=chat(PROMPT)) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        decisions = (await client.get("/admin/decisions")).json()["decisions"]
        assert decisions[-1]["predicted_output_tokens"] == 123
        counted = 'hetero_gateway_predictor_failures_total{reason="exception"} 3.0'
        assert counted in await running.metrics()
    lines = [r.getMessage() for r in caplog.records if "length predictor" in r.getMessage()]
    assert len(lines) == 1
    assert "raising: exception: ValueError at word_predictor.py:" in lines[0]
    assert "nobody else" not in caplog.text


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("not-made", "not-made (word_predictor:NotEvenMade) cannot be made: RuntimeError: no wei"),
        ("nothing", "nothing (word_predictor:make_nothing) has made something without a method"),
        ("missing", "missing (word_predictor:Missing) cannot be made: AttributeError"),
    ],
)
def test_one_that_cannot_be_made_stops_the_start_with_one_line(kind: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_predictor(configured(kind=kind), Path(), Counter())
    assert f"scheduler.predictor: {said}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("on_path")
def test_an_unknown_name_is_told_beside_all_known_ones() -> None:
    data = {"scheduler": {"predictor": {"kind": "wordz"}}}
    with pytest.raises(ConfigError) as caught:
        parse_model(GatewayConfig, data, "gateway.yaml")
    assert str(caught.value) == (
        "gateway.yaml: scheduler.predictor.kind: no predictor is named 'wordz'; there are "
        "bucket-mean, constant, normal, trained, and installed ones (entry points "
        "hetero_gateway.predictors): missing, not-made, nothing, raising, words"
    )


def test_where_nothing_is_installed_its_name_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"installed ones .*: none"):
        parse_model(GatewayConfig, {"scheduler": {"predictor": {"kind": "words"}}}, "x")


# The guard


class Foreign:
    """Answers what it is given, or raises it."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.observed = 0

    def predict(self, features: LengthFeatures) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        self.observed += 1
        if isinstance(self._answer, Exception):
            raise self._answer


@pytest.mark.parametrize(
    ("answer", "predicted", "reason"),
    [
        (300, 300.0, None),
        (0.0, 1.0, None),
        (math.nan, 55.0, "invalid"),
        (math.inf, 55.0, "invalid"),
        (-1, 55.0, "invalid"),
        (None, 55.0, "exception"),
        ("many", 55.0, "exception"),
        (KeyError("x"), 55.0, "exception"),
    ],
)
def test_nonsense_is_replaced_and_counted(answer: Any, predicted: float, reason: str) -> None:
    failures: Counter[str] = Counter()
    guarded = GuardedPredictor("f", Foreign(answer), ConstantPredictor(55.0), failures)
    assert guarded.predict(LengthFeatures("m", 10)) == predicted
    assert failures == ({reason: 1} if reason else {})


def test_the_stand_in_learns_from_every_request_also_when_the_other_fails_to() -> None:
    failures: Counter[str] = Counter()
    foreign, means = Foreign(ValueError()), BucketMeanPredictor(256.0)
    guarded = GuardedPredictor("f", foreign, means, failures)
    for _ in range(500):
        guarded.observe(LengthFeatures("m", 10), 20.0)
    assert foreign.observed == failures["exception"] == 500
    assert guarded.predict(LengthFeatures("m", 10)) < 30


def test_a_slow_answer_is_used_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: Counter[str] = Counter()
    guarded = GuardedPredictor("f", Foreign(9), ConstantPredictor(55.0), failures)
    monkeypatch.setattr(predictors, "SLOW_S", -1.0)
    assert guarded.predict(LengthFeatures("m", 10)) == 9
    assert failures == {"slow": 1}


# Trained ones


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    path = tmp_path / "predictor.json"
    tree = Split("max_tokens", 50, Leaf(7.0, 100), Leaf(77.0, 100))
    write_length_model(path, LengthModel({ANY_MODEL: tree}), {"requests": 200})
    return path


def test_a_trained_model_is_read_from_beside_the_configuration(trained: Path) -> None:
    config = configured(kind="trained", file=trained.name)
    predictor = make_predictor(config, trained.parent, Counter())
    assert predictor.predict(LengthFeatures("m", 10, 50)) == 7
    assert predictor.predict(LengthFeatures("m", 10)) == 77


async def test_it_serves_and_explain_asks_it_too(trained: Path) -> None:
    settings = {"predictor": {"kind": "trained", "file": str(trained)}}
    async with rig(scheduler=settings) as (_, client, _):
        for limit, tokens in ((40, 7), (500, 77)):
            query = f"/admin/explain?prompt_tokens=9&max_tokens={limit}"
            assert (await client.get(query)).json()["predicted_output_tokens"] == tokens
            assert (await client.post(CHAT, json=chat(PROMPT, max_tokens=limit))).status_code == 200
        decisions = (await client.get("/admin/decisions")).json()["decisions"]
        assert [d["predicted_output_tokens"] for d in decisions] == [77, 7]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not JSON"),
        ("\xff", "not JSON"),
        (json.dumps({"format": "x", "version": 1, "models": {}}), "format: must be"),
    ],
)
def test_validate_refuses_a_bad_file_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "predictor.json").write_text(content, encoding="utf-8")
    config = tmp_path / "gateway.yaml"
    config.write_text("scheduler: {predictor: {kind: trained, file: predictor.json}}\n")
    assert main(["validate", "-c", str(config)]) == 2
    error = capsys.readouterr().err
    assert "scheduler.predictor.file: " in error
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "trained"}, "file: kind trained needs one"),
        ({"file": "x.json"}, "file: kind trained needs one"),
        ({"kind": "constant", "file": "x.json"}, "file: kind trained needs one"),
        ({"options": {"a": 1}}, "options: only an installed predictor has any"),
        ({"kind": "normal", "options": {"a": 1}}, "options: only an installed"),
    ],
)
def test_what_does_not_belong_together_is_refused(settings: dict[str, Any], said: str) -> None:
    data = {"scheduler": {"predictor": settings}}
    with pytest.raises(ConfigError) as caught:
        parse_model(GatewayConfig, data, "gateway.yaml")
    assert str(caught.value).startswith("gateway.yaml: scheduler.predictor: ")
    assert said in str(caught.value)
