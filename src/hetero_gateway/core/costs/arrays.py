"""Arrays as types, for what computes with numpy: fits, trees, messages between gateways."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
