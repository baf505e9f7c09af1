"""benchmarks/scheduling/batches.py: when batches were said to end, in virtual time."""

from argparse import Namespace

import pytest

from benchmarks.scheduling.batches import errors_of, in_virtual_time, night
from hetero_gateway.lab.load.result import RequestRecord


@pytest.mark.parametrize(("load", "lines", "most"), [(0.0, 600, 0.2), (0.1, 600, 0.15)])
def test_from_a_tenth_on_a_batch_ends_when_it_says(load, lines, most, tmp_path):
    """Four unequal instances with a few seats, alone (half a minute) and beside chats."""
    args = Namespace(lines=lines, load=load, warm_s=15.0, streamed=4, shorter=2, seats=16)
    records: list[RequestRecord] = []
    told = in_virtual_time(night(args, tmp_path, records if load else None))
    assert told.total == lines > told.seen[-1][1] > 0.9 * lines
    assert (len(records) > 100) is (load > 0)
    errors = errors_of(told)
    assert abs(errors["worst_error"][1]) < most, errors
