"""How commands end when whoever reads their output has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CLUSTER = Path(__file__).parents[2] / "configs" / "clusters" / "paper-a.yaml"


def test_a_reader_that_has_left_is_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "hetero_gateway", "validate", "-c", str(CLUSTER)],
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 141
    assert done.stderr == b""
