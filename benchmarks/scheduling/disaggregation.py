"""The load that is held within limits when prompts may be computed elsewhere than answered.

    python benchmarks/scheduling/disaggregation.py -o cells.jsonl [--clusters a,b] [--mixes chat]
        [--settings tight,...] [--requests 2000] [--seeds 1] [--table]

For each cluster, mix and setting: the highest load, in hundredths of what the instances do
together, at which 90 % of the requests are within the limits. All ways have `finish-time` inside:

    unsplit   the better of it with and without knowing the limits
    fixed     the best of some fixed splits: no whole request, every prompt on one side
    any       each request's own cheapest way, no roles
    ours      roles found at each load by `planner/roles.py` from other requests of the same mix

The mean latency is at 90 % of the load that `unsplit` holds, ours over unsplit's; where it holds
none, at half of what the instances do. Cells that are in the file already are not run again. Mixes
have the mean lengths of Azure's public traces of 2023, drawn from log-normals.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.scheduling.losses import Kind, instances_of
from hetero_gateway.core.instances.pairs import Link, Pairs
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.planner.roles import (
    HARD_S,
    Roles,
    advantage_order,
    find_roles,
    run_under,
    split_of,
)
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.experiment import Experiment, make_workload, measure_bound, mix_moments
from hetero_gateway.sim.held import held_loads
from hetero_gateway.sim.result import RunResult
from hetero_gateway.sim.workload import Lengths, LogNormal, LogNormalLengths

SHARE, START_S, TOKEN_BYTES = 0.9, 0.002, 131072.0
_SOLVED_OTHERWISE = 1000  # seeds of what roles are found from
_NONE_HELD_LOAD = 0.5


def _kind(gpu: str, count: int, tp: int = 1) -> Kind:
    return Kind(f"{gpu}/Llama-3-8B/tp{tp}", count)


CLUSTERS = {
    "4 H100 + 8 L40S": (_kind("H100-80GB-SXM", 4), _kind("L40S-48GB", 8)),
    "2 H100 + 4 A100": (_kind("H100-80GB-SXM", 2), _kind("A100-80GB-SXM", 4)),
    "4 V100 pairs + A800": (_kind("V100-32GB-NVLink2", 4, 2), _kind("A800-80GB-PCIe", 1)),
    "8 A100": (_kind("A100-80GB-SXM", 8),),
}
MIXES: dict[str, Lengths] = {
    "chat": LogNormalLengths(LogNormal(720.0, 1.0, 8000), LogNormal(149.0, 0.85, 1500)),
    "code": LogNormalLengths(LogNormal(1530.0, 0.8, 8000), LogNormal(20.5, 0.8, 400)),
    "long": LogNormalLengths(LogNormal(12000.0, 0.3, 24000), LogNormal(150.0, 0.8, 1500)),
}


class Setting(NamedTuple):
    """Limits, and the links' bandwidth; 0: nobody can hand anything over."""

    slo: Slo
    gbit_per_s: float


TIGHT, LOOSE = Slo(2.0, 0.025), Slo(1.0, 0.05)
SETTINGS = {
    "tight": Setting(TIGHT, 100.0),
    "loose": Setting(LOOSE, 100.0),
    "25 Gbit/s": Setting(TIGHT, 25.0),
    "10 Gbit/s": Setting(TIGHT, 10.0),
    "no pair": Setting(TIGHT, 0.0),
}


class Cell:
    """One cluster, mix and setting."""

    def __init__(self, cluster: str, mix: str, setting: str, requests: int, seeds: int) -> None:
        self.instances = tuple(instances_of(CLUSTERS[cluster]))
        self.setting, self._seeds = SETTINGS[setting], seeds
        self._experiment = Experiment(self.instances, MIXES[mix], requests, self.setting.slo)
        self.moments, self._bound = mix_moments(MIXES[mix]), measure_bound(self._experiment)
        self._roles: dict[float, Roles] = {}

    def pairs(self) -> Pairs:
        link = Link(START_S, self.setting.gbit_per_s * 1e9 / 8)
        ids = [one.instance_id for one in self.instances]
        every = {(one, other): link for one in ids for other in ids if one != other}
        return Pairs(TOKEN_BYTES, every if self.setting.gbit_per_s else {})

    def run(self, load: float, seed: int, roles: Roles, *, limits: bool = True) -> RunResult:
        moments = self.moments
        rate = self._bound.rate_per_s(load, moments)
        workload = make_workload(self._experiment, rate, seed)
        reference = (moments.mean_prompt, moments.mean_output)
        return run_under(
            roles, self.instances, workload, self.pairs, self.setting.slo, reference,
            heeds_slo=limits, seed=seed,
        )  # fmt: skip

    def roles_at(self, load: float) -> Roles:
        """As the gateway would find them from what came before."""
        if load not in self._roles:
            rate = self._bound.rate_per_s(load, self.moments)
            mix = make_workload(self._experiment, rate, _SOLVED_OTHERWISE)
            self._roles[load] = find_roles(self.instances, mix, self.pairs, self.setting.slo)
        return self._roles[load]

    def held(self, roles: Callable[[float], Roles], likely: float, *, limits: bool = True) -> float:
        def share_at(load: float) -> float:
            found = roles(load)
            runs = [self.run(load, seed, found, limits=limits) for seed in range(self._seeds)]
            return float(np.mean([one.slo_share for one in runs]))

        return held_loads(share_at, (SHARE,), step=0.02, likely=likely)[0]

    def fixed(self) -> list[Roles]:
        """Splits at which somebody might keep an instance, in both orders of the machines."""
        moments = self.moments
        order, m = advantage_order(self.instances, moments.mean_prompt, moments.mean_output)
        kinds = [sum(1 for _ in group) for group in _groups(self.instances, order)]
        numbers = {m - 1, m, *np.cumsum(kinds)[:-1].tolist()}
        return [split_of(order, k, HARD_S) for k in sorted(numbers) if 1 <= k < len(order)]

    def measure(self) -> dict[str, float]:
        knows = self.held(lambda _: None, 0.6)
        unsplit = max(knows, self.held(lambda _: None, knows, limits=False))
        cell = {"unsplit": unsplit, "ours": self.held(self.roles_at, 1.3 * unsplit)}
        if self.setting.gbit_per_s:
            cell["any"] = self.held(lambda _: {}, cell["ours"])
            cell["fixed"] = max(self.held(lambda _, f=f: f, cell["ours"]) for f in self.fixed())
        load = 0.9 * unsplit or _NONE_HELD_LOAD
        ours = self.run(load, 0, self.roles_at(load)).latency_s.mean
        cell["latency"] = ours / self.run(load, 0, None).latency_s.mean
        return cell


def _groups(instances: tuple[SimulatedInstance, ...], order: list[str]) -> list[list[str]]:
    """Instances of one profile that follow each other."""
    profile = {one.instance_id: one.profile for one in instances}
    groups: list[list[str]] = []
    for name in order:
        if groups and profile[groups[-1][0]] == profile[name]:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def print_table(cells: dict[tuple[str, str, str], dict[str, float]]) -> None:
    """Each cell, and by setting the geometric mean of ours over unsplit."""
    names = ("unsplit", "fixed", "any", "ours", "latency")
    print(f"{'':40}" + "".join(f"{name:>9}" for name in names) + f"{'ratio':>9}")
    gains: dict[str, list[float]] = {}
    for (setting, cluster, mix), cell in cells.items():
        ratio = cell["ours"] / cell["unsplit"] if cell["unsplit"] else float("nan")
        if cell["unsplit"]:
            gains.setdefault(setting, []).append(ratio)
        shown = "".join(f"{cell[n]:9.2f}" if n in cell else f"{'–':>9}" for n in names)
        print(f"{setting:<12}{cluster:<21}{mix:<7}{shown}{ratio:9.2f}")
    for setting, found in gains.items():
        mean = float(np.exp(np.mean(np.log(found))))
        print(f"{setting}: {mean:.2f} × unsplit, {min(found):.2f} to {max(found):.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    listed = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--clusters", type=listed, default=list(CLUSTERS))
    parser.add_argument("--mixes", type=listed, default=["chat", "code"])
    parser.add_argument("--settings", type=listed, default=["tight"])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="of what is in the file alone")
    parser.add_argument("-o", type=Path, required=True, help="cells, as JSON lines; added to")
    args = parser.parse_args()
    cells: dict[tuple[str, str, str], dict[str, float]] = {}
    if args.o.exists():
        for line in args.o.read_text(encoding="utf-8").splitlines():
            *key, cell = json.loads(line)
            cells[tuple(key)] = cell
    if not args.table:
        with args.o.open("a", encoding="utf-8") as out:
            for setting in args.settings:
                for mix in args.mixes:
                    for cluster in args.clusters:
                        key = (setting, cluster, mix)
                        if key not in cells:
                            cells[key] = Cell(
                                cluster, mix, setting, args.requests, args.seeds
                            ).measure()
                            print(json.dumps([*key, cells[key]]), file=out, flush=True)
    print_table(cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
