"""Trained length models on disk."""

import json
from pathlib import Path

import pytest

from hetero_gateway.core.lengths.length_model import ANY_MODEL, Leaf, LengthModel, Split
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.length_model_file import read_length_model, write_length_model

MODEL = LengthModel({ANY_MODEL: Split("prompt_tokens", 64.0, Leaf(7.25, 100), Leaf(77.0, 100))})


def test_what_was_written_is_read_and_says_where_it_is_from(tmp_path: Path) -> None:
    path = tmp_path / "predictor.json"
    path.write_text("an older one")
    write_length_model(path, MODEL, {"source": "trace.csv"})
    assert read_length_model(path) == MODEL
    assert json.loads(path.read_text())["about"] == {"source": "trace.csv"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/predictor.json: cannot be written: No such"):
        write_length_model(tmp_path / "nowhere" / "predictor.json", MODEL, {})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"format": NaN}', "version is missing|models is missing"),
    ],
)
def test_what_is_no_model_is_refused_with_its_file(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "predictor.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_length_model(path)
    assert str(caught.value).startswith(f"{path}: ")
