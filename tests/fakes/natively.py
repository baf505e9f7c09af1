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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that cannot run on it have to fail, so that no mark outlives its reason.

    Of the cases of one test the first and the last: the others have values of the same types, and
    were tried on the source.
    """
    assert compiled.form() == "compiled"
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    few = {each[i] for each in cases.values() for i in (0, -1)}
    few |= {item for item in items if item.get_closest_marker("interpreted")}
    config.hook.pytest_deselected(items=[item for item in items if item not in few])
    items[:] = [item for item in items if item in few]
    for item in items:
        if mark := item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.xfail(reason=mark.args[0], strict=True))
