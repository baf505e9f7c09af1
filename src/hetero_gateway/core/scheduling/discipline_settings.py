"""What a configuration says of queue disciplines: to read one needs no arithmetic."""

from __future__ import annotations

from typing import Literal

DisciplineName = Literal["fifo", "shortest", "classes", "clients"]
DEFAULT_DISCIPLINE: DisciplineName = "shortest"

# What comes together is sorted whatever it is. Longer, who comes in a burst that takes seconds
# waits as long again at its end (latency's p99 1.16 to 1.20 times as high where seats are few), and
# below saturation mean latency is 1 % lower.
DEFAULT_PATIENCE_S = 1.0

# Beside a flood others then wait no longer than where all ask for what the machines bear. It costs
# 4 % of the throughput meanwhile (benchmarks/scheduling/fair_shares.py).
DEFAULT_RESERVE = 0.1
