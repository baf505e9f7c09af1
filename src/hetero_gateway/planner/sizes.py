"""The size of an instance: how many accelerators it takes, and how vLLM divides the model.

    tensor      every matrix over so many accelerators                --tensor-parallel-size
    pipeline    the layers over so many stages of ``tensor`` each     --pipeline-parallel-size
    data        so many copies of everything but the experts          --data-parallel-size
    experts     whole experts on tensor · data accelerators           --enable-expert-parallel
    machines    that it spans, stage by stage                         --nnodes

A ``Size`` is the number of accelerators that it takes **on one machine**, so that the sizes of a
layout add up, and a size with only tensor parallelism is that number: ``Size(4) == 4``.
Two that take as many but divide the model otherwise are different: ``Size(2, pipeline=2) != 4``.
Order is by number alone. In names it is ``4``, ``2-pp2``, ``1-dp4-ep``, preceded by ``tp``.
"""

from typing import Self


class Size(int):
    """See the module's text.

    Raises:
        ValueError: a part below 1, or accelerators that machines cannot have in equal numbers.
    """

    tensor: int
    pipeline: int
    data: int
    experts: bool
    machines: int

    def __new__(
        cls,
        tensor: int,
        pipeline: int = 1,
        data: int = 1,
        experts: bool = False,
        machines: int = 1,
    ) -> Self:
        whole = tensor * pipeline * data
        if min(tensor, pipeline, data, machines) < 1 or whole % machines:
            raise ValueError(f"no size: {(tensor, pipeline, data, machines)}")
        size = super().__new__(cls, whole // machines)
        size.tensor, size.pipeline, size.data = tensor, pipeline, data
        size.experts, size.machines = experts, machines
        return size

    @property
    def accelerators(self) -> int:
        """On all of its machines."""
        return int(self) * self.machines

    @property
    def plain(self) -> bool:
        """Whether it has only tensor parallelism."""
        return self._key == (self.tensor, 1, 1, False, 1)

    @property
    def _key(self) -> tuple[int, int, int, bool, int]:
        return self.tensor, self.pipeline, self.data, self.experts, self.machines

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Size):
            return self._key == other._key
        return self.plain and int(self) == other

    def __ne__(self, other: object) -> bool:  # int has one of its own
        return not self == other

    def __hash__(self) -> int:
        return hash(int(self)) if self.plain else hash(self._key)

    def __getnewargs__(self) -> tuple[int, int, int, bool, int]:  # type: ignore[override]
        return self._key

    def __str__(self) -> str:
        parts = [str(self.tensor)]
        if self.pipeline > 1:
            parts.append(f"pp{self.pipeline}")
        if self.data > 1:
            parts.append(f"dp{self.data}")
        if self.experts:
            parts.append("ep")
        if self.machines > 1:
            parts.append(f"on{self.machines}")
        return "-".join(parts)

    __repr__ = __str__

    def __format__(self, how: str) -> str:
        return format(str(self), how)


def as_size(size: int) -> Size:
    """A plain number is a tensor parallelism."""
    return size if isinstance(size, Size) else Size(size)


def layer_partition(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as in vLLM (vllm/distributed/utils.py:126, get_pp_indices).

    The remainder goes, one each, to the last stages except the very last, which has the output
    layer.
    """
    each, left = divmod(layers, stages)
    return tuple(each + (1 <= stages - 1 - i <= left) for i in range(stages))
