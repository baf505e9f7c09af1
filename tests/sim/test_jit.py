"""What numba has compiled is kept, and found again by whoever has the same source."""

import importlib.util
from pathlib import Path

import pytest

from hetero_gateway.sim.jit import can_compile, compiled

SOURCE = """
FACTOR = 3


def inner(number):
    return FACTOR * number


def doubled(number):
    return 2 * inner(number)
"""

pytestmark = pytest.mark.skipif(not can_compile(), reason="numba is not installed")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from numba.core import config

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path


def of_checkout(folder: Path, source: str):
    folder.mkdir()
    (folder / "loops.py").write_text(source, "utf-8")
    spec = importlib.util.spec_from_file_location("loops", folder / "loops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return compiled(module.doubled)


def test_another_checkout_of_the_same_source_compiles_nothing(kept: Path) -> None:
    source = SOURCE
    first, second = of_checkout(kept / "a", source), of_checkout(kept / "b", source)
    assert first(7) == second(7) == 42
    assert sum(first.stats.cache_misses.values()) == 1
    assert not first.stats.cache_hits
    assert sum(second.stats.cache_hits.values()) == 1
    assert not second.stats.cache_misses


@pytest.mark.parametrize(
    "changes", [("3\n", "4\n"), ("FACTOR * number", "FACTOR + number")], ids=["constant", "callee"]
)
def test_what_a_function_calls_and_takes_is_part_of_what_it_is(changes, kept: Path) -> None:
    source = SOURCE
    first, second = (
        of_checkout(kept / "a", source),
        of_checkout(kept / "b", source.replace(*changes)),
    )
    assert first(7) == 42
    assert second(7) == {"3\n": 56, "FACTOR * number": 20}[changes[0]]
    assert not second.stats.cache_hits
