"""CPU time and memory of whole process trees, and of everything else on the machine.

A process's CPU comes from its POSIX CPU clock, which counts nanoseconds and threads that have
ended too; utime and stime in /proc/PID/stat step by 10 ms, and /proc/PID/schedstat is the first
thread alone. A tree is the root, its descendants, and every process of the root's session, so
that a worker whose parent has gone is still counted. A process that both starts and ends between
two reads is not seen: none of the servers measured here makes such.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def process_cpu_s(pid: int) -> float:
    """CPU seconds of one process with all its threads; 0 when it has gone."""
    # MAKE_PROCESS_CPUCLOCK of the kernel's posix-timers.h, with CPUCLOCK_SCHED (2).
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _stat_fields(pid: str) -> tuple[int, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[1]), int(fields[3])  # parent, session


def tree_pids(root: int) -> list[int]:
    """The root, its descendants and its session, as far as they are alive."""
    parents: dict[int, int] = {}
    members = {root}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if (fields := _stat_fields(name)) is not None:
            parents[int(name)] = fields[0]
            if fields[1] == root:
                members.add(int(name))
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in members} - members
        members |= more
        grew = bool(more)
    return sorted(pid for pid in members if pid in parents)


def tree_cpu_s(root: int) -> float:
    """CPU seconds that the tree of `root` has used so far."""
    return sum(process_cpu_s(pid) for pid in tree_pids(root))


def tree_memory_bytes(root: int) -> tuple[int, int]:
    """Resident and proportional set size of the tree of `root`, in bytes."""
    rss = pss = 0
    for pid in tree_pids(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("Rss:"):
                rss += int(line.split()[1]) * 1024
            elif line.startswith("Pss:"):
                pss += int(line.split()[1]) * 1024
    return rss, pss


@dataclass(frozen=True)
class MachineCpu:
    """Busy and stolen CPU seconds since boot, over all cores."""

    busy_s: float
    steal_s: float

    @classmethod
    def now(cls) -> MachineCpu:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) for f in fields)
        busy = user + nice + system + irq + softirq + steal
        return cls(busy / TICKS_PER_S, steal / TICKS_PER_S)
