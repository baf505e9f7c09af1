"""Array types for code that computes with numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
