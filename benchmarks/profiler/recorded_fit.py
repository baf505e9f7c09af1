"""How well p1..p9 fit public measurements: a row per model, hardware and tensor parallelism.

    python benchmarks/profiler/recorded_fit.py measured.csv
    python benchmarks/profiler/recorded_fit.py measured.csv \\
        --export llama2-70b/a100-80gb/tp4 samples.csv

The file is splitwise-sim's table of measured prompt and token times (Mutinifni/splitwise-sim, MIT),
with the columns model, hardware, tensor_parallel, prompt_size, batch_size, token_size (output
tokens asked for), prompt_time, token_time (mean between tokens) and e2e_time, in milliseconds.

Two things in it must be mended before a fit means anything, and are counted:

- Outputs were not forced to their length: e2e_time shows fewer steps of token_time than asked for.
  A sequence that ran alone has then as many tokens as fit into its time; others are discarded.
- Some batches took many times their steps' time: they did not fit the KV cache and ran in turns.
  They are discarded.

Hardware whose name ends in -pcap (a power cap) is left out: its prompt times are the uncapped ones
times 1.3 to the last digit, so they were not measured.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetero_gateway.core.costs.fitting import Fit, PartFit, Sample, fit
from hetero_gateway.errors import ConfigError, ProfileError
from hetero_gateway.lab.profiler.document import unidentified
from hetero_gateway.lab.profiler.samples import write_csv

# Steps that a batch's time has room for, over those asked for: 1.00 to 1.02 where all went well.
_WHOLE = (0.98, 1.05)
SHORT, TURNS = "stopped early", "ran in turns"


@dataclass
class Group:
    """The samples of one model, hardware and tensor parallelism; ``as_asked``: nothing mended."""

    samples: list[Sample] = field(default_factory=list)
    as_asked: list[Sample] = field(default_factory=list)
    mended: int = 0
    discarded: Counter[str] = field(default_factory=Counter)


def read_groups(path: Path) -> dict[str, Group]:
    """By name, ``MODEL/HARDWARE/tpN``, in the file's order.

    Raises:
        ConfigError: it is not that file.
    """
    groups: dict[str, Group] = {}
    try:
        with path.open(newline="") as lines:
            for row in csv.DictReader(lines):
                if row["hardware"].endswith("-pcap"):
                    continue
                name = f"{row['model']}/{row['hardware']}/tp{row['tensor_parallel']}"
                _add(groups.setdefault(name, Group()), row)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not splitwise-sim's table: {error}") from error
    return groups


def _add(group: Group, row: dict[str, str]) -> None:
    batch, prompt, asked = (float(row[key]) for key in ("batch_size", "prompt_size", "token_size"))
    prefill_s = float(row["prompt_time"]) / 1000
    decode_s = float(row["e2e_time"]) / 1000 - prefill_s
    steps = decode_s / (float(row["token_time"]) / 1000)
    low, high = _WHOLE
    group.as_asked.append(Sample(batch, prompt, asked, prefill_s, decode_s))
    if steps > high * (asked - 1):
        group.discarded[TURNS] += 1
    elif steps >= low * (asked - 1):
        group.samples.append(group.as_asked[-1])
    elif batch == 1:
        group.samples.append(Sample(batch, prompt, round(steps) + 1, prefill_s, decode_s))
        group.mended += 1
    else:
        group.discarded[SHORT] += 1


def table(groups: dict[str, Group], seed: int, *, as_asked: bool = False) -> list[str]:
    """Markdown, a line each."""
    lines = [
        "| profile | samples | mended | discarded | prefill R² | median | mean | worst "
        "| mean by Eq. (3) | decode R² | median | mean | worst | not identified |",
        "|---|" + "---:|" * 12 + "---|",
    ]
    for name, group in groups.items():
        samples = group.as_asked if as_asked else group.samples
        fitted = fit(samples, rng=np.random.default_rng(seed))
        cells = [name, str(len(samples))]
        cells += ["–", "–"] if as_asked else [str(group.mended), str(group.discarded.total())]
        cells += _errors(fitted.prefill) + _errors(fitted.decode)[:4]
        cells.append(_names(fitted))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _errors(part: PartFit) -> list[str]:
    errors = (part.median_error, part.mean_error, part.worst_error, part.eq_3_error)
    return [f"{part.r2:.3f}", *("–" if e is None else f"{e:.1%}" for e in errors)]


def _names(fitted: Fit) -> str:
    names = unidentified(fitted)
    return "all" if len(names) == 9 else ", ".join(names) or "–"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="splitwise-sim's measured times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--as-asked", action="store_true", help="take token_size for the output, mend nothing"
    )
    parser.add_argument(
        "--export", nargs=2, metavar=("GROUP", "CSV"), help="write one group for profile --from"
    )
    args = parser.parse_args(argv)
    try:
        groups = read_groups(args.file)
        if args.export:
            name, output = args.export
            if name not in groups:
                parser.error(f"no group {name}; there are {', '.join(groups)}")
            write_csv(Path(output), groups[name].samples)
        else:
            print("\n".join(table(groups, args.seed, as_asked=args.as_asked)))
    except (ConfigError, ProfileError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
