"""``hetero-gateway emulate`` as a process."""

import argparse
import re
import signal
import subprocess
import sys

import httpx
import pytest

from hetero_gateway.cli import emulate
from hetero_gateway.errors import ConfigError

PROFILE = "V100-32GB-NVLink2/Llama-3-8B/tp4"
RUN = (
    "import argparse, sys; from hetero_gateway.cli import emulate;"
    "p = argparse.ArgumentParser(); emulate.add_parser(p.add_subparsers());"
    "a = p.parse_args(['emulate', *sys.argv[1:]]); sys.exit(a.run(a))"
)


def run_with(*arguments):
    parser = argparse.ArgumentParser()
    emulate.add_parser(parser.add_subparsers())
    args = parser.parse_args(["emulate", *arguments])
    return args.run(args)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_takes_a_free_port_says_so_and_stops_cleanly(number):
    command = [sys.executable, "-c", RUN, "--profile", PROFILE, "--port", "0", "--model", "m"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            found = re.search(r"on (http://127\.0\.0\.1:\d+)$", line.strip())
            assert found, line
            asked = {"model": "m", "prompt": "x", "max_tokens": 8000, "stream": True}
            url = f"{found[1]}/v1/completions"
            with httpx.stream("POST", url, json={**asked, "ignore_eos": True}) as response:
                chunks = response.iter_raw()
                next(chunks)
                process.send_signal(number)
                rest = b"".join(chunks)
            assert b'"finish_reason":"abort"' in rest
            assert process.wait(20) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "V100/nope"), "no profile is named"),
        (("--profile", "missing.yaml"), "missing.yaml"),
        (("--profile", PROFILE, "--time-scale", "0"), "--time-scale"),
        (("--profile", PROFILE, "--max-num-seqs", "0"), "--max-num-seqs"),
        (("--profile", PROFILE, "--max-model-len", "10000000"), "--max-model-len"),
        (("--profile", PROFILE, "--max-num-batched-tokens", "4"), "--max-num-batched-tokens"),
        (("--profile", PROFILE, "--output-lengths", "missing.csv"), "missing.csv"),
        (("--profile", PROFILE, "--mean-output-tokens", "0.5"), "--mean-output-tokens"),
        (("--profile", PROFILE, "--cv-output-tokens=-1"), "--cv-output-tokens"),
        (("--profile", PROFILE, "--port", "70000"), "--port"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, message):
    with pytest.raises(ConfigError) as caught:
        run_with(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
