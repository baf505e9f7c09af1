"""A plugin of pytest's (``-p tests.fakes.natively``): the tests run on the compiled scheduler."""

import hypothesis
import pytest

from hetero_gateway import compiled

why_not = compiled.take()
assert not why_not, why_not


def pytest_configure() -> None:
    """What is compiled fails with the first value of another type, or not at all."""
    few = hypothesis.settings(hypothesis.settings.get_profile("tests"), max_examples=20)
    hypothesis.settings.register_profile("natively", few)
    hypothesis.settings.load_profile("natively")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that cannot run on it have to fail, so that no mark outlives its reason."""
    assert compiled.form() == "compiled"
    for item in items:
        if mark := item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.xfail(reason=mark.args[0], strict=True))
