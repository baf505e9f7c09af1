"""Plans of these tests are simulated compiled where numba is there: in a tenth of the time, with
the same records to the last bit, as tests/sim/compiled shows. tests/conftest.py groups them with
what compiles.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from hetero_gateway.planner import trials
from hetero_gateway.sim.cluster import Records, simulate
from hetero_gateway.sim.fleet import can_compile


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> Iterator[None]:
    def run(*args: Any, **options: Any) -> Records:
        return simulate(*args, **options | {"compiled": can_compile()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "simulate", run)
        yield
