"""Commands as functions: what they print, after a look at how they ended."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from hetero_gateway.cli import main
from tests.fakes.planning import one_run_of_each_alone  # noqa: F401 - used by all


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command to its exit code; what it printed, with ``out`` and ``err``."""

    def run(*words: Any, code: int = 0) -> Any:
        try:
            ended = main([str(word) for word in words])
        except SystemExit as usage:
            ended = int(usage.code or 0)
        captured = capsys.readouterr()
        assert ended == code, captured.err
        return captured

    return run


@pytest.fixture
def document(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same with ``--json``; what that prints."""
    return lambda *words, code=0: json.loads(run(*words, "--json", code=code).out)


@pytest.fixture
def error(run: Callable[..., Any]) -> Callable[..., str]:
    """The same of a command that fails; its one line."""

    def error(*words: Any, code: int = 2) -> str:
        out, err = run(*words, code=code)
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("hetero-gateway: ")
        return str(err)

    return error
