"""Configuration defaults of queue disciplines, free of the arithmetic's imports."""

from __future__ import annotations

from typing import Literal

DisciplineName = Literal["fifo", "shortest", "classes", "clients"]
DEFAULT_DISCIPLINE: DisciplineName = "shortest"

# Requests that arrive together are sorted in any case. With more, a request of a burst that takes
# seconds waits as long again at its end (latency's p99 1.16 to 1.20 times as high with few seats),
# and below saturation mean latency is 1 % lower.
DEFAULT_PATIENCE_S = 1.0

# Beside a flood, others then wait no longer than if everyone asked for what the machines can serve.
# It costs 4 % of the throughput meanwhile (benchmarks/scheduling/fair_shares.py).
DEFAULT_RESERVE = 0.1
