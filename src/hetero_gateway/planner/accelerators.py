"""A catalogue of accelerators: data-sheet figures, and how far to trust them.

    column        unit           meaning
    flop_per_s    FLOP/s         dense matrix products in fp16 or bf16, sums in fp32; no sparsity
    fp8, int8     op/s           the same in fp8 and int8; 0 where the hardware has none
    memory_bytes  bytes          what the name says, in GiB
    usable_bytes  bytes          what a process finds there: reported by the driver, where known
    memory_bytes_per_s  bytes/s  of the memory
    link_bytes_per_s    bytes/s  one direction, what an all-reduce between neighbours goes over

Names are those of the built-in profiles where there are some. Figures are of one device as vLLM
sees it: an MI250X card is two. Vendors count memory in units that differ; "80 GB" is 80 GiB here,
and what is really there is ``usable_bytes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hetero_gateway.core.nearest import folded, nearest_names
from hetero_gateway.errors import ConfigError

GIB: Final = 2**30
# Usable over nominal where no figure is known: the mean of the listed cards with ECC on HBM is
# 0.99, of those with GDDR6 0.95; the lower of HBM's (V100 0.985) is on the safe side of it.
USABLE_SHARE = 0.985
# Share of the data sheet's figures that large matrix products and streaming reads reach, fitted to
# the built-in profiles of measured operators by benchmarks/planner/roofline.py.
COMPUTE_EFFICIENCY = 0.72
MEMORY_EFFICIENCY = 0.78
# Relative error of a roofline's step times: of one that was held against measured operators (the
# table in roofline.py), of a card of the same make as one that was, and of one never seen.
CHECKED, RELATED, UNCHECKED = 0.15, 0.25, 0.4


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device: its data sheet, and what a roofline may assume of it.

    Args:
        link_bytes_per_s: 0: none is known, so no tensor parallelism.
        usable_memory_bytes: None: ``USABLE_SHARE`` of the nominal.
        max_group: most devices that one instance can sensibly span (a box, a board).
        uncertainty: relative, of step times from this roofline.
        cuda_capability: of NVIDIA's; None for others. Below 8.0 there is no bf16.
        source: where the figures are from.
    """

    name: str
    flop_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float = 0.0
    compute_efficiency: float = COMPUTE_EFFICIENCY
    memory_efficiency: float = MEMORY_EFFICIENCY
    usable_memory_bytes: float | None = None
    fp8_op_per_s: float = 0.0
    int8_op_per_s: float = 0.0
    max_group: int = 8
    uncertainty: float = UNCHECKED
    cuda_capability: float | None = None
    bf16: bool = True
    source: str = ""

    @property
    def usable_bytes(self) -> float:
        """What a process finds on it, before anything is loaded."""
        if self.usable_memory_bytes is not None:
            return self.usable_memory_bytes
        return self.memory_bytes * USABLE_SHARE


def _nvidia(
    name: str,
    tflops: float,
    gib: float,
    gb_per_s: float,
    link_gb_per_s: float,
    capability: float,
    usable_gib: float | None = None,
    *,
    fp8: float = 0.0,
    int8: float = 0.0,
    efficiency: float = COMPUTE_EFFICIENCY,
    uncertainty: float = RELATED,
    source: str,
) -> Accelerator:
    """A row in the units of the data sheets: TFLOP/s, GiB, GB/s."""
    return Accelerator(
        name,
        tflops * 1e12,
        gib * GIB,
        gb_per_s * 1e9,
        link_gb_per_s * 1e9,
        efficiency,
        usable_memory_bytes=None if usable_gib is None else usable_gib * GIB,
        fp8_op_per_s=fp8 * 1e12,
        int8_op_per_s=int8 * 1e12,
        uncertainty=uncertainty,
        cuda_capability=capability,
        bf16=capability >= 8.0,
        source=source,
    )


# One direction of a x16 slot, GB/s; traffic between cards goes over it twice at most, but a card's
# own link is what limits a ring. NVLink: half of the total that data sheets print.
PCIE3, PCIE4, PCIE5 = 16.0, 32.0, 64.0
NVLINK2, NVLINK3, NVLINK3_A800, NVLINK4, NVLINK5 = 150.0, 300.0, 200.0, 450.0, 900.0

_V100 = "NVIDIA V100 data sheet (2020)"
_A100 = "NVIDIA A100 data sheet (2021)"
_A800 = "NVIDIA A800: as A100, NVLink 400 GB/s"
_H100 = "NVIDIA H100 data sheet (2022), without sparsity"

# GIB columns: nominal, and usable as drivers report it in vLLM's logs (None: not known).
_ROWS: tuple[Accelerator, ...] = (
    # Its 14.2 TFLOP/s of fp32 sums are half of what is printed for fp16 sums, as of all GeForce.
    _nvidia("RTX2080Ti-11GB", 53.8, 11, 616, PCIE3, 7.5, 10.75, int8=215,
            uncertainty=UNCHECKED, source="NVIDIA Turing TU102 white paper"),
    _nvidia("V100-16GB-PCIe3", 112, 16, 900, PCIE3, 7.0, 15.77, source=_V100),
    _nvidia("V100-16GB-NVLink2", 125, 16, 900, NVLINK2, 7.0, 15.77, source=_V100),
    _nvidia("V100-32GB-PCIe3", 112, 32, 900, PCIE3, 7.0, 31.74, source=_V100),
    _nvidia("V100-32GB-NVLink2", 125, 32, 900, NVLINK2, 7.0, 31.74, source=_V100),
    # 65 TFLOP/s is a peak that 70 W do not hold: measured layers reach 25.6, and 228 GB/s.
    _nvidia(
        "T4-16GB", 65, 16, 320, PCIE3, 7.5, 14.6, int8=130, efficiency=0.4,
        source="NVIDIA T4 data sheet (2019)",
    ),
    _nvidia("A10-24GB", 125, 24, 600, PCIE4, 8.6, 22.06, int8=250, efficiency=0.5,
            source="NVIDIA A10 data sheet (2021)"),
    # AWS's own variant; NVIDIA prints no sheet of it: AWS says 70 TFLOP/s fp16.
    _nvidia("A10G-24GB", 70, 24, 600, PCIE4, 8.6, 22.06, int8=140,
            source="AWS EC2 G5 announcement (2021)"),
    _nvidia("A100-40GB-PCIe", 312, 40, 1555, PCIE4, 8.0, 39.5, int8=624, source=_A100),
    _nvidia("A100-40GB-SXM", 312, 40, 1555, NVLINK3, 8.0, 39.5, int8=624, source=_A100),
    _nvidia("A100-80GB-PCIe", 312, 80, 1935, PCIE4, 8.0, 79.15, int8=624, source=_A100),
    _nvidia("A100-80GB-SXM", 312, 80, 2039, NVLINK3, 8.0, 79.15, int8=624,
            uncertainty=CHECKED, source=_A100),
    _nvidia("A800-80GB-PCIe", 312, 80, 1935, PCIE4, 8.0, 79.15, int8=624, source=_A800),
    _nvidia("A800-80GB-SXM", 312, 80, 2039, NVLINK3_A800, 8.0, 79.15, int8=624, source=_A800),
    # Half of the arithmetic, because that is what the L40S of the same generation reaches, and at
    # 72 W it is not going to be more.
    _nvidia("L4-24GB", 121, 24, 300, PCIE4, 8.9, 22.06, fp8=242, int8=242, efficiency=0.5,
            source="NVIDIA L4 data sheet (2023)"),
    _nvidia("L40S-48GB", 362, 48, 864, PCIE4, 8.9, 44.35, fp8=733, int8=733, efficiency=0.5,
            uncertainty=CHECKED, source="NVIDIA L40S data sheet (2023)"),
    _nvidia("H100-80GB-PCIe", 756, 80, 2039, PCIE5, 9.0, 79.19, fp8=1513, int8=1513, source=_H100),
    _nvidia("H100-80GB-SXM", 989, 80, 3350, NVLINK4, 9.0, 79.19, fp8=1979, int8=1979,
            uncertainty=CHECKED, source=_H100),
    _nvidia("H200-141GB", 989, 141, 4800, NVLINK4, 9.0, 139.81, fp8=1979, int8=1979,
            uncertainty=CHECKED, source="NVIDIA H200 data sheet (2024)"),
    _nvidia("GH200-96GB", 989, 96, 4000, NVLINK4, 9.0, 94.5, fp8=1979, int8=1979,
            source="NVIDIA GH200 data sheet (2023), HBM3"),
    _nvidia("GH200-144GB", 989, 144, 4900, NVLINK4, 9.0, fp8=1979, int8=1979,
            source="NVIDIA GH200 data sheet (2023), HBM3e"),
    _nvidia("H20-96GB", 148, 96, 4000, NVLINK4, 9.0, fp8=296, int8=296, uncertainty=UNCHECKED,
            source="published H20 figures (no data sheet of NVIDIA's)"),
    _nvidia("B200-180GB", 2250, 180, 7700, NVLINK5, 10.0, 178.36, fp8=4500, int8=4500,
            uncertainty=UNCHECKED, source="NVIDIA HGX B200 data sheet (2024)"),
    _nvidia("A5000-24GB", 111, 24, 768, PCIE4, 8.6, 23.57, int8=222,
            source="NVIDIA RTX A5000 data sheet"),
    _nvidia("A6000-48GB", 155, 48, 768, PCIE4, 8.6, 47.5, int8=310,
            source="NVIDIA RTX A6000 data sheet"),
    # GeForce: products with fp32 sums run at half of the fp16 rate that is advertised.
    _nvidia("RTX3090-24GB", 71, 24, 936, PCIE4, 8.6, 23.6, int8=284,
            source="NVIDIA GA102 white paper"),
    _nvidia("RTX4090-24GB", 165, 24, 1008, PCIE4, 8.9, 23.52, fp8=330, int8=661,
            source="NVIDIA Ada white paper"),
    _nvidia("RTX5090-32GB", 209, 32, 1792, PCIE5, 12.0, 31.37, fp8=419, int8=838,
            uncertainty=UNCHECKED, source="NVIDIA RTX Blackwell white paper"),
    _nvidia("RTX-PRO-6000-96GB", 504, 96, 1792, PCIE5, 12.0, fp8=1008, int8=1008,
            uncertainty=UNCHECKED, source="NVIDIA RTX Blackwell PRO white paper"),
    # One of the two dies of a card; one xGMI link between cards.
    Accelerator(
        "MI250X-64GB", 191.5e12, 64 * GIB, 1638e9, 50e9, 0.5, int8_op_per_s=191.5e12,
        source="AMD MI250X data sheet, per die",
    ),
    # Seven xGMI links of 64 GB/s.
    Accelerator(
        "MI300X-192GB", 1307e12, 192 * GIB, 5300e9, 448e9, 0.5,
        usable_memory_bytes=191.98 * GIB, fp8_op_per_s=2615e12, int8_op_per_s=2615e12,
        source="AMD MI300X data sheet (2023)",
    ),
    # 21 of the 24 ports of 100 and 200 Gbit/s join the eight of a box.
    Accelerator(
        "MI325X-256GB", 1307e12, 256 * GIB, 6000e9, 448e9, 0.5,
        fp8_op_per_s=2615e12, int8_op_per_s=2615e12, source="AMD MI325X data sheet (2024)",
    ),
    Accelerator(
        "Gaudi2-96GB", 432e12, 96 * GIB, 2450e9, 262e9, fp8_op_per_s=865e12,
        source="Intel Gaudi 2 white paper",
    ),
    Accelerator(
        "Gaudi3-128GB", 1678e12, 128 * GIB, 3700e9, 525e9, 0.5, fp8_op_per_s=1678e12,
        source="Intel Gaudi 3 white paper (2024)",
    ),
    # Published by others; HCCS: seven links of 28 GB/s.
    Accelerator(
        "Ascend-910B-64GB", 313e12, 64 * GIB, 1600e9, 196e9, 0.5, usable_memory_bytes=60.97 * GIB,
        int8_op_per_s=640e12, source="published Ascend 910B3 figures",
    ),
)  # fmt: skip

ACCELERATORS: Final[dict[str, Accelerator]] = {row.name: row for row in _ROWS}

# Other names that people use where one card is clearly meant.
_ALIASES: Final[dict[str, str]] = {
    folded(alias): name
    for name, aliases in {
        "V100-16GB-PCIe3": ("V100-16GB-PCIe",),
        "V100-16GB-NVLink2": ("V100-16GB-SXM", "V100-16GB-SXM2", "V100-16GB-NVLink"),
        "V100-32GB-PCIe3": ("V100-32GB-PCIe",),
        "V100-32GB-NVLink2": ("V100-32GB-SXM", "V100-32GB-SXM2", "V100-32GB-NVLink"),
        "T4-16GB": ("T4",),
        "A10-24GB": ("A10",),
        "A10G-24GB": ("A10G",),
        "A100-40GB-SXM": ("A100-40GB-SXM4",),
        "A100-80GB-SXM": ("A100-80GB-SXM4",),
        "A800-80GB-PCIe": ("A800-PCIe",),
        "A800-80GB-SXM": ("A800-SXM", "A800-SXM4"),
        "L4-24GB": ("L4",),
        "L40S-48GB": ("L40S",),
        "H100-80GB-PCIe": ("H100-PCIe",),
        "H100-80GB-SXM": ("H100-SXM", "H100-SXM5", "H100-80GB-HBM3"),
        "H200-141GB": ("H200", "H200-SXM", "H200-141GB-SXM"),
        "H20-96GB": ("H20",),
        "B200-180GB": ("B200", "B200-192GB", "B200-SXM"),
        "A5000-24GB": ("A5000", "RTX-A5000"),
        "A6000-48GB": ("A6000", "RTX-A6000"),
        "RTX3090-24GB": ("RTX3090", "RTX-3090"),
        "RTX4090-24GB": ("RTX4090", "RTX-4090"),
        "RTX5090-32GB": ("RTX5090", "RTX-5090"),
        "RTX-PRO-6000-96GB": ("RTX-PRO-6000", "RTX-6000-PRO", "RTX-PRO-6000-Blackwell"),
        "MI250X-64GB": ("MI250X", "MI250X-128GB", "MI250X-GCD"),
        "MI300X-192GB": ("MI300X",),
        "MI325X-256GB": ("MI325X",),
        "GH200-96GB": ("GH200", "GH200-480GB"),
        "GH200-144GB": ("GH200-144GB-HBM3e",),
        "RTX2080Ti-11GB": ("RTX2080Ti", "RTX-2080-Ti", "2080Ti"),
        "Gaudi2-96GB": ("Gaudi2", "Gaudi-2"),
        "Gaudi3-128GB": ("Gaudi3", "Gaudi-3"),
        "Ascend-910B-64GB": ("Ascend-910B", "910B"),
    }.items()
    for alias in (name, *aliases)
} | {folded(name): name for name in ACCELERATORS}


# Names that several cards have, and the one that most people mean who say no more.
_USUAL: Final[dict[str, str]] = {
    folded(said): name
    for said, name in {
        "H100": "H100-80GB-SXM",
        "H100-80GB": "H100-80GB-SXM",
        "A100": "A100-80GB-SXM",
        "A100-80GB": "A100-80GB-SXM",
        "A100-40GB": "A100-40GB-SXM",
        "A100-40": "A100-40GB-SXM",
        "A800": "A800-80GB-SXM",
        "A800-80GB": "A800-80GB-SXM",
        "V100": "V100-16GB-NVLink2",
        "V100-16GB": "V100-16GB-NVLink2",
        "V100-32GB": "V100-32GB-NVLink2",
    }.items()
}


def accelerator(name: str, own: Mapping[str, Accelerator] | None = None) -> Accelerator:
    """The accelerator of that name; case and dashes do not matter.

    Args:
        own: the user's, which come first.

    Raises:
        ConfigError: with the nearest names.
    """
    for mine in (own or {}).values():
        if folded(mine.name) == folded(name):
            return mine
    known = _ALIASES.get(folded(name)) or _USUAL.get(folded(name))
    if known is None:
        raise ConfigError(
            f"accelerator {name!r} is not in the catalogue; the nearest: "
            + ", ".join(nearest_names(name, ACCELERATORS))
            + "; or describe it under accelerators"
        )
    return ACCELERATORS[known]


def taken_for(name: str) -> str | None:
    """What a name that several cards have is taken for, in words; None: it is of one card."""
    usual = _USUAL.get(folded(name))
    if usual is None:
        return None
    return f"{name} is taken for {usual}; say so if it is the one in PCIe slots"
