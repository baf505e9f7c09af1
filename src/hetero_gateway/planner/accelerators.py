"""An accelerator: data-sheet figures, and how far to trust them.

    column        unit           meaning
    flop_per_s    FLOP/s         dense matrix products in fp16 or bf16, sums in fp32; no sparsity
    fp8, int8     op/s           the same in fp8 and int8; 0 if the hardware has none
    memory_bytes  bytes          the nominal memory, in GiB
    usable_bytes  bytes          available to a process: as the driver reports, if known
    memory_bytes_per_s  bytes/s  of the memory
    link_bytes_per_s    bytes/s  one direction, of the link that an all-reduce of neighbours uses

Names are those of the built-in profiles, if there are any. Figures are of one device as vLLM sees
it: an MI250X card is two. Vendors count memory in units that differ; "80 GB" is 80 GiB here, and
the actual amount is ``usable_bytes``.
"""

from dataclasses import dataclass
from typing import Final

GIB: Final = 2**30
# Usable over nominal if no figure is known: the mean of the listed cards with ECC on HBM is 0.99,
# of those with GDDR6 0.95; this is just below HBM's lowest (V100, 0.985), to be safe.
USABLE_SHARE = 0.985
# Share of the data sheet's figures that large matrix products and streaming reads reach, fitted to
# the built-in profiles of measured operators by benchmarks/planner/roofline.py.
COMPUTE_EFFICIENCY = 0.72
MEMORY_EFFICIENCY = 0.78
# Of a layer's many small kernels in one step; fitted in the same way.
LAYER_OVERHEAD_S = 3.9e-5
# Relative error of a roofline's step times: if it was compared with measured engines or operators
# (docs/evidence/planner.md); for a card of the same make, or compared with one run; and for an
# untested one, or one that was off.
CHECKED, RELATED, UNCHECKED = 0.15, 0.25, 0.4


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device: its data sheet, and what a roofline may assume about it.

    Args:
        link_bytes_per_s: 0: unknown, so no tensor parallelism.
        usable_memory_bytes: None: ``USABLE_SHARE`` of the nominal.
        max_group: most devices that one instance can sensibly span (a box, a board).
        layer_overhead_s: of one layer's small kernels in a step.
        uncertainty: relative, of step times from this roofline.
        known: its basis: compared with measured engines ("engine") or sums of measured
            "operators", of the same make as one that was ("related"), or "unchecked": only its
            data sheet.
        cuda_capability: of NVIDIA's; None for others. Below 8.0 there is no bf16.
        source: of the figures.
    """

    name: str
    flop_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float = 0.0
    compute_efficiency: float = COMPUTE_EFFICIENCY
    memory_efficiency: float = MEMORY_EFFICIENCY
    layer_overhead_s: float = LAYER_OVERHEAD_S
    usable_memory_bytes: float | None = None
    fp8_op_per_s: float = 0.0
    int8_op_per_s: float = 0.0
    max_group: int = 8
    uncertainty: float = UNCHECKED
    known: str = "unchecked"
    cuda_capability: float | None = None
    source: str = ""

    @property
    def bf16(self) -> bool:
        return self.cuda_capability is None or self.cuda_capability >= 8.0

    @property
    def usable_bytes(self) -> float:
        """Memory available to a process before anything is loaded."""
        if self.usable_memory_bytes is not None:
            return self.usable_memory_bytes
        return self.memory_bytes * USABLE_SHARE
