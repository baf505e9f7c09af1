"""How a machine can be divided into instances; equal machines are one case.

A layout is a multiset of sizes whose sum is at most u_i. The paper's layouts, p_i·t_i = u_i with
one t_i, are among them; so are unequal ones (4+2+1+1 of 8), and equal ones that leave accelerators
idle. A layout with room for one more instance is only listed if it is equal: one more instance
never makes a machine slower by itself, but an unequal one can under a policy that gives every
instance as much. An instance that spans several machines takes all of each.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetero_gateway.planner.plan import Key, Layout, Machine
from hetero_gateway.planner.sizes import as_size

# A StatefulSet's name is this, "-tpNN" and, on its pods, an ordinal: 63 characters at most.
_MOST_NAME = 40


@dataclass(frozen=True, slots=True)
class Group:
    """Machines that are equal in all relevant properties; ``ids`` in order."""

    accelerator: str
    count: int
    price_per_hour_usd: float | None
    ids: tuple[str, ...]

    @property
    def machines(self) -> int:
        return len(self.ids)


def group_machines(machines: Sequence[Machine]) -> tuple[Group, ...]:
    """Equal machines together, in an order that does not depend on the given one."""
    ids: dict[tuple[str, int, float | None], list[str]] = {}
    for machine in machines:
        key = (machine.accelerator, machine.count, machine.price_per_hour_usd)
        ids.setdefault(key, []).append(machine.id)
    groups = [Group(*key, tuple(sorted(of))) for key, of in ids.items()]
    return tuple(sorted(groups, key=lambda g: (g.accelerator, g.count, g.ids)))


def machine_layouts(accelerators: int, feasible: Collection[int]) -> list[Layout]:
    """The relevant layouts of one machine; see the module's text. Largest t first."""
    wide = {(t,) for t in feasible if stretches(t) and int(t) == accelerators}
    sizes = sorted((t for t in feasible if not stretches(t)), reverse=True)
    if not sizes:
        return sorted(wide)
    found = wide | set(_full(accelerators, sizes))
    found |= {(t,) * (accelerators // t) for t in sizes if t <= accelerators}
    return sorted(found, reverse=True)


def feasible_sizes(group: Group, sizes: Iterable[Key]) -> list[int]:
    """The sizes that the group's machines can have, of those by (accelerator, size)."""
    return [
        t
        for a, t in sizes
        if a == group.accelerator
        and int(t) <= group.count
        and (not stretches(t) or (int(t) == group.count and together((t,)) <= group.machines))
    ]


def stretches(size: int) -> bool:
    """Whether an instance of this size takes more than one machine."""
    return as_size(size).machines > 1


def together(layout: Layout) -> int:
    """Number of machines that have this layout together: those that its instance spans."""
    return max((as_size(t).machines for t in layout), default=1)


def best_by_use(accelerators: int, worth: Mapping[int, float]) -> list[tuple[float, Layout]]:
    """The layouts with the highest summed worth for their use, fewest accelerators first.

    Args:
        worth: by size, above 0.

    Returns:
        (worth, layout); only those that are worth more than every one that uses less.
    """
    exact: list[tuple[float, Layout]] = [(0.0, ())]
    result: list[tuple[float, Layout]] = []
    for used in range(1, accelerators + 1):
        options = [
            (exact[used - t][0] + value, tuple(sorted((*exact[used - t][1], t), reverse=True)))
            for t, value in worth.items()
            if t <= used and not stretches(t) and exact[used - t][0] >= 0
        ]
        exact.append(max(options, default=(-1.0, ())))
        if exact[used][0] > (result[-1][0] if result else 0.0):
            result.append(exact[used])
    return result


def describe(layout: Layout) -> str:
    """``4×tp2`` of an equal layout, ``tp4 + 2×tp1`` of a mixed one, ``–`` of none."""
    counts = Counter(layout)
    parts = [f"{n}×tp{t}" if n > 1 else f"tp{t}" for t, n in sorted(counts.items(), reverse=True)]
    return " + ".join(parts) or "–"


def _full(accelerators: int, sizes: Sequence[int]) -> Iterator[Layout]:
    """Every multiset of ``sizes`` (descending) that leaves no room for the smallest."""

    def extend(taken: Layout, left: int, first: int) -> Iterator[Layout]:
        if left < sizes[-1]:
            if taken:
                yield taken
            return
        for i in range(first, len(sizes)):
            if sizes[i] <= left:
                yield from extend((*taken, sizes[i]), left - sizes[i], i)

    return extend((), accelerators, 0)


def machine_names(ids: Sequence[str]) -> dict[str, str]:
    """A DNS label for each machine id, all different."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for machine_id in ids:
        base = re.sub(r"[^a-z0-9]+", "-", machine_id.lower()).strip("-")[:_MOST_NAME].rstrip("-")
        base = base or "machine"
        if base[0].isdigit():  # a Service's name begins with a letter
            base = f"m{base}"
        name, number = base, 2
        while name in taken:
            name, number = f"{base}-{number}", number + 1
        taken.add(name)
        names[machine_id] = name
    return names
