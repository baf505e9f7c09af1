"""Loads as ``core/instances/state.py`` keeps them: whole numbers of 2^-40 s, of any size.

Python's integers have no end; these have three digits of base 2^60, lowest first. A charge is at
most T·e^50 (``MAX_EXPONENT``), so that sums stay below 2^180 as long as T times their number is
below ``MOST_SUM_S``.
"""

import math

from hetero_gateway.core.costs.arrays import Integers
from hetero_gateway.core.instances.dispatch import UNITS_PER_S
from hetero_gateway.sim.compiled.tables import DIGITS

_BITS = 60
_BASE = 1 << _BITS
_MASK = _BASE - 1
_FLOAT_BASE = 2.0**_BITS
_UNIT_BITS = 40
# e^50 is below 2^73.
MOST_SUM_S = 2.0 ** (DIGITS * _BITS - 73 - _UNIT_BITS)


def set_units(digits: Integers, workload_s: float) -> None:
    """``round(workload · UNITS_PER_S)``, half to even."""
    rest = workload_s * UNITS_PER_S
    if rest < _FLOAT_BASE:
        # Above 2^53 it is whole as it is.
        rest = float(round(rest))
    for i in range(DIGITS - 1, 0, -1):
        power = _FLOAT_BASE**i
        digit = math.floor(rest / power)
        digits[i] = int(digit)
        rest -= digit * power
    digits[0] = int(rest)


def add(total: Integers, digits: Integers) -> None:
    carry = 0
    for i in range(DIGITS):
        carry += total[i] + digits[i]
        total[i] = carry & _MASK
        carry >>= _BITS


def subtract(total: Integers, digits: Integers) -> None:
    """What is taken off was added before."""
    borrow = 0
    for i in range(DIGITS):
        borrow += total[i] - digits[i]
        total[i] = borrow & _MASK
        borrow >>= _BITS


def seconds(total: Integers) -> float:
    """The nearest float of the sum over ``UNITS_PER_S``, as Python divides."""
    top = DIGITS - 1
    while top > 0 and total[top] == 0:
        top -= 1
    value = total[top]
    if top == 0:
        return float(value) / UNITS_PER_S
    # 60 or 61 bits from the top, the last one of which is set if any below is: so that one
    # rounding, to 53 bits, is right.
    taken = 61 - math.frexp(float(value))[1]
    following = total[top - 1]
    value = (value << taken) | (following >> (_BITS - taken))
    below = following & ((1 << (_BITS - taken)) - 1)
    if top > 1:
        below |= total[0]
    if below != 0:
        value |= 1
    return math.ldexp(float(value), top * _BITS - taken - _UNIT_BITS)
