"""The catalogue of accelerators: the rows of accelerators.csv, found by common names."""

from collections.abc import Mapping
from typing import Final

from hetero_gateway.core.nearest import folded, nearest_names
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.package_data import table
from hetero_gateway.planner.accelerators import (
    CHECKED,
    COMPUTE_EFFICIENCY,
    GIB,
    LAYER_OVERHEAD_S,
    MEMORY_EFFICIENCY,
    RELATED,
    UNCHECKED,
    Accelerator,
)

_UNCERTAINTIES: Final = {
    "engine": CHECKED,
    "operators": CHECKED,
    "related": RELATED,
    "unchecked": UNCHECKED,
}
_ROWS: Final = list(table("accelerators.csv"))


def _accelerator(row: Mapping[str, str]) -> Accelerator:
    return Accelerator(
        row["name"],
        float(row["tflops"]) * 1e12,
        int(row["gib"]) * GIB,
        float(row["gb_per_s"]) * 1e9,
        float(row["link_gb_per_s"] or 0) * 1e9,
        float(row["efficiency"] or COMPUTE_EFFICIENCY),
        float(row["memory_share"] or MEMORY_EFFICIENCY),
        layer_overhead_s=float(row["layer_us"] or LAYER_OVERHEAD_S * 1e6) / 1e6,
        usable_memory_bytes=float(row["usable_gib"]) * GIB if row["usable_gib"] else None,
        fp8_op_per_s=float(row["fp8_tops"] or 0) * 1e12,
        int8_op_per_s=float(row["int8_tops"] or 0) * 1e12,
        uncertainty=_UNCERTAINTIES[row["known"]],
        known=row["known"],
        cuda_capability=float(row["cuda_capability"]) if row["cuda_capability"] else None,
        source=row["source"],
    )


def _names(column: str) -> dict[str, str]:
    """Rows by the names in a column, folded."""
    return {
        folded(said): row["name"] for row in _ROWS if row[column] for said in row[column].split(";")
    }


ACCELERATORS: Final = {row["name"]: _accelerator(row) for row in _ROWS}
_BY_NAME: Final = _names("aliases") | _names("name")
# Names that several cards share, and the card most commonly meant.
_USUAL: Final = _names("usual_for")


def accelerator(name: str, own: Mapping[str, Accelerator] | None = None) -> Accelerator:
    """The accelerator of that name; case and dashes do not matter.

    Args:
        own: the user's, which take precedence.

    Raises:
        ConfigError: with the nearest names.
    """
    for mine in (own or {}).values():
        if folded(mine.name) == folded(name):
            return mine
    known = _BY_NAME.get(folded(name)) or _USUAL.get(folded(name))
    if known is None:
        raise ConfigError(
            f"accelerator {name!r} is not in the catalogue; the nearest: "
            + ", ".join(nearest_names(name, ACCELERATORS))
            + "; or describe it under accelerators"
        )
    return ACCELERATORS[known]


def taken_for(name: str) -> str | None:
    """The interpretation of a name that several cards share, in words; None: it is unique."""
    usual = _USUAL.get(folded(name))
    if usual is None:
        return None
    return f"{name} is taken for {usual}; say so if it is the one in PCIe slots"
