"""Non-negative least squares, which solves every fit of constants.

scipy is imported at the first call and nowhere else: it is 300 modules and 30 to 40 MB, and a
gateway is seldom asked to fit anything.
"""

from __future__ import annotations

from hetero_gateway.core.costs.arrays import FloatArray


def non_negative_solution(rows: FloatArray, wanted: FloatArray) -> FloatArray:
    """The x ≥ 0 that minimises |rows·x − wanted|² (Lawson and Hanson's algorithm)."""
    from scipy.optimize import nnls

    solution: FloatArray = nnls(rows, wanted)[0]
    return solution
