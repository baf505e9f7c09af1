"""What ``profile URL`` recovers of an emulated instance whose constants are known.

    python benchmarks/profiler/profiled.py --time-scale 1 --passes 1 --budget 240
    python benchmarks/profiler/profiled.py --time-scale 10 --slower 4 --passes 2 --budget 200
    python benchmarks/profiler/profiled.py --time-scale 10 --slower 4 --passes 1 --budget 150 \\
        --interrupt
    python benchmarks/profiler/profiled.py --time-scale 1 --gate

All nine planted constants matter somewhere on the grid. Printed are the ratios found / planted,
and the errors of predicted batches on a hold-out grid of combinations of batch size and length
that are not measured: prefills of one step or of one prompt, and decodes. ``--slower`` multiplies
the constants: at a high time scale the emulator's timers (1 ms) and the machine's scheduling must
be small against a step.

``--interrupt`` measures twice: once in one go; once killed after a third (SIGKILL), interrupted
after two thirds (SIGINT) and resumed. It says whether the constants of the second lie within the
first one's 95 % intervals, or else whether the two intervals meet, and how far the predictions are
apart.

``--gate`` measures no profile: it times the prefill of a few batches with and without a gate, five
times each, against what is planted.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple
from itertools import product
from pathlib import Path

import httpx
import numpy as np
import yaml

from hetero_gateway.core.costs.cost_model import decode_time_s, prefill_time_s
from hetero_gateway.core.costs.fitting import Sample, fit
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.lab.load.children import Children
from hetero_gateway.lab.load.client import LoadClient, Reply, parse_target
from hetero_gateway.lab.load.emulated import write_profile
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind
from hetero_gateway.lab.profiler.batch import BatchSender
from hetero_gateway.lab.profiler.grid import GridCell
from hetero_gateway.lab.profiler.live import samples_path
from hetero_gateway.lab.profiler.samples import kept_samples, read_json_lines
from hetero_gateway.lab.profiler.tracks import Track, read_batch, track
from hetero_gateway.lab.profiler.verdicts import KEY

PLANTED = Constants(
    p1=2.0e-4,
    p2=4.0e-3,
    p3=1.5e-4,
    p4=0.08,
    p5=1.0e-6,
    p6=6.0e-4,
    p7=2.0e-5,
    p8=0.02,
    p9=4.0e-8,
)
KV_TOKENS, MAX_NUM_SEQS, STEP_TOKENS = 40_000, 32, 2048
BATCHES = (1, 3, 6, 12, 24, 32)
PROMPTS = (24, 48, 96, 200, 400, 800, 1600)
LONG_PROMPTS = (3000, 6000)
OUTPUTS = (20, 100)


def main() -> None:
    args = parse_args()
    planted = Profile("planted", "planted", 1, PLANTED.scaled(args.slower), KV_TOKENS, MAX_NUM_SEQS)
    with tempfile.TemporaryDirectory() as name, Children(Path(name)) as children:
        folder = Path(name)
        write_profile(planted, folder / "planted.yaml")
        child = children.start(
            "the emulated instance",
            *("emulate", "--profile", str(folder / "planted.yaml"), "--port", "0"),
            *("--time-scale", f"{args.time_scale:g}"),
        )
        url = asyncio.run(child.url())
        if args.gate:
            asyncio.run(gates(url, planted.constants.scaled(1 / args.time_scale)))
            return
        whole = folder / "whole.yaml"
        began_s = time.perf_counter()
        profile(args, url, whole)
        print(f"measured in {time.perf_counter() - began_s:.0f} s")
        truth = planted.constants.scaled(1 / args.time_scale)
        compare(load_profile(str(whole)).constants, truth)
        fitted_to_everything(whole, truth)
        if args.interrupt:
            interrupted(args, url, folder, whole)
        text = httpx.get(f"{url}/metrics").text
        lost = [line for line in text.splitlines() if line.startswith("hetero_gateway_emulator_l")]
        print(f"the emulator fell behind by {float(lost[0].split()[-1]):.2f} s")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time-scale", type=float, default=10.0)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--interrupt", action="store_true")
    parser.add_argument("--gate", action="store_true")
    return parser.parse_args()


def command(args: argparse.Namespace, url: str, output: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "hetero_gateway", "profile", url, "-o", str(output)),
        *("--passes", str(args.passes), "--budget", f"{args.budget:g}"),
        *("--max-num-seqs", str(MAX_NUM_SEQS), *more),
    ]


def profile(args: argparse.Namespace, url: str, output: Path, *more: str) -> None:
    subprocess.run(command(args, url, output, *more), check=True)


def compare(found: Constants, planted: Constants) -> None:
    ratios = zip(astuple(found), astuple(planted), strict=True)
    print(
        "found / planted: " + ", ".join(f"p{i} {a / b:.3f}" for i, (a, b) in enumerate(ratios, 1))
    )
    for name, errors in differences(found, planted).items():
        print(
            f"{name}: {len(errors)} held-out cells, error mean {np.mean(errors):.2%}, "
            f"worst {np.max(errors):.2%}"
        )


def fitted_to_everything(whole: Path, planted: Constants) -> None:
    """The same samples with every prefill of several steps fitted as it was measured."""
    records = read_json_lines(samples_path(whole))
    deep = [
        Sample(r["batch_size"], r[KEY]["prompt_tokens"], 1, r[KEY]["prefill_s"], None)
        for r in records
        if KEY in r
    ]
    found = fit([*kept_samples(records), *deep], rng=np.random.default_rng(0), resamples=20)
    errors = differences(found.constants, planted)["prefill"]
    print(
        f"with the {len(deep)} prefills of several steps fitted as well: "
        f"prefill error mean {np.mean(errors):.2%}, worst {np.max(errors):.2%}"
    )


async def gates(url: str, planted: Constants) -> None:
    """Measured over planted prefill time, with and without a gate."""
    target = parse_target(url)
    client = LoadClient(target, "/v1/completions", stream=True, timeout_s=60)
    sender = BatchSender(client, "planted")
    maker = BodyMaker("planted", PromptKind.TOKEN_IDS, True, 4.0, "")
    for b, prompt in ((2, 512), (4, 64), (8, 128), (16, 16), (32, 16), (32, 64)):
        with_gate, without = [], []
        for _ in range(5):
            shot = await sender.measure(GridCell(b, prompt, 16, one_step=True), 512)
            assert shot.reading is not None
            with_gate.append(shot.reading.whole.prefill_s or 0.0)
            await client.warm(b)
            replies = [Reply(0.0, parts=[]) for _ in range(b)]
            bodies = [maker.body(i, prompt, 16) for i in range(b)]
            await asyncio.gather(*map(client.post, bodies, replies))
            tracks = [t for t in (track(r, prompt) for r in replies) if isinstance(t, Track)]
            began_s = min(r.sent_s for r in replies)
            without.append(read_batch(tracks, began_s).whole.prefill_s or 0.0)
        truth_s = prefill_time_s(planted, b, prompt)
        print(
            f"| {b} × {prompt} | {truth_s * 1e3:.0f} ms | {np.mean(with_gate) / truth_s:.3f} | "
            f"{np.mean(without) / truth_s:.3f} |"
        )
    await client.aclose()


def differences(one: Constants, other: Constants) -> dict[str, list[float]]:
    """Relative differences of what two sets of constants say of the hold-out grid."""

    def apart(seconds: Callable[[Constants], float]) -> float:
        return abs(seconds(one) / seconds(other) - 1)

    prefill = [
        apart(lambda c, b=b, i=i: prefill_time_s(c, b, i))
        for b, i in (*product(BATCHES, PROMPTS), *((1, i) for i in LONG_PROMPTS))
        if b * i <= STEP_TOKENS or b == 1
    ]
    decode = [
        apart(lambda c, b=b, i=i, o=o: decode_time_s(c, b, i, o))
        for b, i, o in product(BATCHES, PROMPTS, OUTPUTS)
        if b * (i + o) <= KV_TOKENS
    ]
    return {"prefill": prefill, "decode": decode}


def interrupted(args: argparse.Namespace, url: str, folder: Path, whole: Path) -> None:
    """The second measurement, and how it differs from the first."""
    output = folder / "interrupted.yaml"
    enough = len(samples_path(whole).read_bytes().splitlines())
    for number, share, more in (
        (signal.SIGKILL, 1 / 3, ()),
        (signal.SIGINT, 2 / 3, ("--resume",)),
    ):
        process = subprocess.Popen(command(args, url, output, *more), stdout=subprocess.DEVNULL)
        while process.poll() is None and lines(output) < share * enough:
            time.sleep(0.05)
        process.send_signal(number)
        print(f"ended by signal {number:d}: exit code {process.wait()}, {lines(output)} samples")
    profile(args, url, output, "--resume")
    one, other = load_profile(str(whole)).constants, load_profile(str(output)).constants
    intervals, others = (
        yaml.safe_load(path.read_text())["source"]["intervals"] for path in (whole, output)
    )
    for i, value in enumerate(astuple(other), 1):
        low, high = intervals[f"p{i}"]
        other_low, other_high = others[f"p{i}"]
        # Both are estimates: of two good ones, one in six lies outside the other's interval.
        inside = "inside" if low <= value <= high else "outside, but the two intervals meet"
        if other_low > high or other_high < low:
            inside = "APART"
        print(f"p{i}: {value:.4g}, of the run in one go {low:.4g} to {high:.4g}: {inside}")
    for name, errors in differences(other, one).items():
        print(f"{name}: the two differ by {np.mean(errors):.2%}, at most {np.max(errors):.2%}")


def lines(output: Path) -> int:
    path = samples_path(output)
    return len(path.read_bytes().splitlines()) if path.exists() else 0


if __name__ == "__main__":
    main()
