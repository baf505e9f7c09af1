"""What a configuration says of queue disciplines: to read one needs no arithmetic."""

from __future__ import annotations

from typing import Literal

DisciplineName = Literal["fifo", "shortest", "classes", "clients"]

# Long beside what a request takes, short beside what a client waits for a batch.
DEFAULT_PATIENCE_S = 60.0

# Beside a flood others then wait no longer than where all ask for what the machines bear. It costs
# 4 % of the throughput meanwhile (benchmarks/scheduling/fair_shares.py).
DEFAULT_RESERVE = 0.1
