"""The figures that a choice was made from."""

from array import array

from hetero_gateway.core.policies.base import Figures


def test_one_figure_is_that_of_its_column() -> None:
    figures = Figures(("load_s", "in_flight", "kv_usage"), array("d", [1.5, 2, 0.25, 3, 0, 0.5]))
    assert figures.column("load_s") == [1.5, 3.0]
    assert figures.column("kv_usage") == [0.25, 0.5]
    for name in figures.names:
        assert [figures.at(name, candidate) for candidate in range(2)] == figures.column(name)
