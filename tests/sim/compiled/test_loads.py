"""Sums of charges are those of whole numbers without an end."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.instances.dispatch import UNITS_PER_S
from hetero_gateway.sim.compiled import loads

charges_s = st.one_of(
    st.floats(0, 1e-9), st.floats(0, 100), st.floats(0, 1e24), st.integers(0, 2**62).map(float)
)


@given(st.lists(st.tuples(charges_s, st.booleans()), min_size=1, max_size=30))
def test_a_load_is_to_the_bit_what_the_scheduler_keeps(charges):
    total, expected, taken_off = np.zeros(loads.DIGITS, np.int64), 0, []
    for charge_s, stays in charges:
        digits = np.zeros(loads.DIGITS, np.int64)
        loads.set_units(digits, charge_s)
        loads.add(total, digits)
        expected += round(charge_s * UNITS_PER_S)
        assert loads.seconds(total) == expected / UNITS_PER_S
        if not stays:
            taken_off.append((digits, round(charge_s * UNITS_PER_S)))
    for digits, units in taken_off:
        loads.subtract(total, digits)
        expected -= units
        assert loads.seconds(total) == expected / UNITS_PER_S


@given(st.integers(2**60, 2**179))
def test_one_rounding_is_enough(units):
    total = np.array([(units >> 60 * i) & (2**60 - 1) for i in range(loads.DIGITS)])
    assert loads.seconds(total) == units / UNITS_PER_S
