"""The figures that a choice was made from."""

from array import array

import numpy as np
import pytest

from hetero_gateway.core.policies.base import Figures

NAMES = ("load_s", "in_flight", "kv_usage")
ROWS = [[1.5, 2.0, 0.25], [3.0, 0.0, 0.5]]


@pytest.mark.parametrize(
    "figures",
    [
        Figures(NAMES, array("d", [figure for row in ROWS for figure in row])),
        Figures(NAMES, tuple(np.array(ROWS).T)),
    ],
    ids=["small", "large"],
)
def test_one_figure_is_that_of_its_column(figures: Figures) -> None:
    for name in NAMES:
        column = figures.column(name)
        assert [figures.at(name, candidate) for candidate in range(2)] == column.tolist()
