"""Records: what is read, and what is said of one that cannot be."""

from pathlib import Path

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.recorded_run import read_recorded_run

HEADER = '{"record":1,"policy":"min-max","started_s":5.0,"unix_s":1.0}\n'
PROFILE = (
    '{"gpu":"g","model":"m","tensor_parallel":1,"constants":[1e-5,0,0,0.01,0,1e-4,0,0.01,0],'
    '"kv_capacity_tokens":1000,"max_num_seqs":8}'
)
INSTANCE = f'{{"instance":"a","weight":2.0,"profile":{PROFILE}}}\n'
REQUEST = (
    '{"at":%s,"model":"m","in":7,"out":9,"predicted":5.5,"outcome":"completed","instance":"a",'
    '"placed":9.0,"first":9.5,"end":10.0,"stream":true}\n'
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_times_count_from_the_first_arrival(tmp_path):
    text = HEADER + INSTANCE + REQUEST % 8.5 + REQUEST % 7.0 + '{"left_out":3,"why":"slow"}\n'
    run = read_recorded_run(written(tmp_path, text))
    assert (run.policy, run.left_out) == ("min-max", 3)
    assert [request.at for request in run.requests] == [0.0, 1.5]
    assert (run.requests[0].placed, run.requests[0].first, run.requests[0].end) == (2.0, 2.5, 3.0)
    assert run.instances["a"].profile is not None
    assert run.instances["a"].profile.constants.p4 == 0.01
    assert run.instances["a"].weight == 2.0


def test_a_line_that_was_cut_short_ends_it(tmp_path):
    text = HEADER + INSTANCE + REQUEST % 8.5 + (REQUEST % 9)[:40]
    assert len(read_recorded_run(written(tmp_path, text)).requests) == 1


def test_a_process_that_went_on_has_a_header_of_its_own(tmp_path):
    text = HEADER + INSTANCE + REQUEST % 8.5 + HEADER + INSTANCE + REQUEST % 9.5
    assert len(read_recorded_run(written(tmp_path, text)).requests) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request"),
        (REQUEST % 1, "line 1: it does not begin with a header"),
        ("hello\n", "line 1: it is no line of a record"),
        (HEADER + REQUEST % 1, "line 2: instance 'a' is not described"),
        (HEADER + INSTANCE + REQUEST % '"x"', "line 3"),
        (HEADER + INSTANCE + (REQUEST % 1).replace('"in":7', '"in":-7'), "in is -7"),
        (HEADER + INSTANCE.replace("2.0", "0.0"), "weight is 0.0"),
        (HEADER + INSTANCE.replace('"gpu":"g",', ""), "its profile cannot be read"),
        (HEADER + HEADER.replace("min-max", "paper"), "the policy changes"),
        (HEADER.replace('"record":1', '"record":2'), "version 1 only"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        read_recorded_run(written(tmp_path, text))
