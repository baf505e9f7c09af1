"""CPU seconds of `hetero-gateway plan`, each in a process of its own.

    python benchmarks/planner/cost.py [--rounds 3] [--only prefixes]

The shipped files of several machines, and 5 000 requests of a chat whose prompts begin alike
(``prefix_traces.py``) on four V100s and an A800. Printed, as Markdown, is the least CPU time of the
rounds, of imports and all: other work on a machine adds to it, and nothing takes off. Exit code 1
where it is above what is wanted.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.scheduling.prefix_traces import make_rows, write

ROOT = Path(__file__).resolve().parents[2]
FILES = ("plan-mixed", "plan-offers", "plan-paper")
PREFIXES = "prefixes"
FILE_GOAL_S, PREFIXES_GOAL_S = 5.0, 10.0
CLUSTER = """\
model: Llama-3.1-8B
machines:
  - {id: v100, accelerator: V100-32GB-NVLink2, count: 4}
  - {id: a800, accelerator: A800-80GB-PCIe, count: 1}
"""


def arguments(name: str, folder: Path, requests: int = 5000) -> list[str]:
    """The command's words for one of ``FILES``, or ``PREFIXES``, for which files are written."""
    if name != PREFIXES:
        return ["-c", str(ROOT / f"configs/clusters/{name}.yaml")]
    cluster, trace = folder / "cluster.yaml", folder / "chat.jsonl.gz"
    cluster.write_text(CLUSTER, encoding="utf-8")
    write(trace, make_rows("chat", requests, 1.0, 0)[0], "prefix_traces.py chat, seed 0")
    return ["-c", str(cluster), "--requests", str(trace)]


def cpu_s(words: Sequence[str]) -> float:
    """Of one plan. CalledProcessError: it has failed."""

    def so_far_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    begin_s = so_far_s()
    command = [sys.executable, "-m", "hetero_gateway", "plan", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return so_far_s() - begin_s


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what a plan costs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=(*FILES, PREFIXES), help="only this one")
    args = parser.parse_args(argv)
    met = True
    print("| plan | CPU, s | wanted |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in (*FILES, PREFIXES):
            if args.only not in (None, name):
                continue
            words = arguments(name, Path(folder))
            least_s = min(cpu_s(words) for _ in range(args.rounds))
            goal_s = PREFIXES_GOAL_S if name == PREFIXES else FILE_GOAL_S
            met &= least_s <= goal_s
            print(f"| {name} | {least_s:.1f} | {goal_s:g} |", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
