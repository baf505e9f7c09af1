"""``profile --from-gateway``: a profile from a running gateway's observations of an instance.

The rows come from /admin/observations; ``core/instances/calibration.py`` fits them. Constants that
traffic does not determine stay near the gateway's current profile of the instance, and the file
says which they are. The gateway is only read; nothing in it changes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hetero_gateway.core.costs.profile import DEFAULT_MAX_NUM_SEQS, Constants
from hetero_gateway.core.instances.calibration import LEAST_ROWS, NAMES, Errors, Refit, refit
from hetero_gateway.core.instances.observation import FirstTokenRow, StepRow
from hetero_gateway.errors import ConfigError, HeteroGatewayError, ProfileError
from hetero_gateway.files.profile_file import ProfileModel, profile_document, write_profile_file
from hetero_gateway.files.yaml_file import parse_model
from hetero_gateway.lab.profiler.document import ProfiledInstance, rounded

# Fields of a profile that are not constants; a fit leaves them alone.
_KEPT = ("first_token_s", "plans_ahead", "experts_awake_at", "idle_expert_s")


def write_observed(
    seen: Mapping[str, Any],
    output: Path,
    *,
    gpu: str | None = None,
    tensor_parallel: int | None = None,
    kv_capacity_tokens: int | None = None,
    max_num_seqs: int | None = None,
) -> str:
    """Fit a profile from a gateway's observations, write it, and return a report.

    Args:
        seen: the answer of /admin/observations for one instance.
        output: the profile file.
        gpu, tensor_parallel, kv_capacity_tokens, max_num_seqs: replace the present profile's;
            an instance without a profile needs ``kv_capacity_tokens`` if its engine shows none.

    Raises:
        ConfigError: an option is wrong or missing; the file cannot be written.
        HeteroGatewayError: the rows have other fields than these.
        ProfileError: it has not seen enough.
    """
    present: Mapping[str, Any] = seen["profile"] or {}
    fit = fit_observed(seen)
    capacity = kv_capacity_tokens or present.get("kv_capacity_tokens")
    capacity = capacity or seen["kv_capacity_tokens"]
    if capacity is None:
        raise ConfigError(
            f"--kv-capacity-tokens: needed, as neither a profile nor the engine of instance "
            f"{seen['instance']} tells it"
        )
    models: Sequence[str] = seen["models"] or ["unknown"]
    instance = ProfiledInstance(
        gpu or present.get("gpu", "unknown"),
        present.get("model", models[0]),
        tensor_parallel or present.get("tensor_parallel", 1),
        capacity,
        max_num_seqs or present.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS),
    )
    # Properties that traffic does not show stay unchanged.
    kept = {name: present[name] for name in _KEPT if present.get(name)}
    profile = dataclasses.replace(instance.profile(fit.constants), **kept)
    document = profile_document(profile, _source(fit, seen))
    parse_model(ProfileModel, document, str(output)).to_core()  # our own output must be acceptable
    write_profile_file(output, document)
    return report(fit, seen)


def fit_observed(seen: Mapping[str, Any]) -> Refit:
    """The constants fitted to the rows of /admin/observations.

    Raises:
        ProfileError: too few rows.
        HeteroGatewayError: the rows have other fields than these.
    """
    try:
        caching = seen.get("prefix_caching")
        steps = _rows(seen["step_fields"], seen["steps"], StepRow, caching)
        first_tokens = _rows(
            seen["first_token_fields"], seen["first_tokens"], FirstTokenRow, caching
        )
        base = (seen["profile"] or {}).get("constants") or seen["stand_in"]
        present = Constants(**base)
        beside_s = float((seen["profile"] or {}).get("first_token_s") or 0.0)
    except (KeyError, TypeError, ValueError) as error:
        raise HeteroGatewayError(
            f"the gateway's observations cannot be read, it may be of another version: {error!r}"
        ) from error
    fit = refit(steps, first_tokens, present, beside_s)
    if fit is not None:
        return fit
    busy = sum(row.steps > 0 for row in steps)
    has = f"the gateway has {busy} rows of streams of instance {seen['instance']}"
    if busy >= LEAST_ROWS:
        raise ProfileError(
            f"{has}, and it is not known how much of their prompts was prefilled and how much "
            "cached: have the engine tell (--enable-prompt-tokens-details, or its /metrics), or "
            "turn its prefix cache off meanwhile"
        )
    raise ProfileError(
        f"{has}, about one a second, and {LEAST_ROWS} are needed: let it serve for longer; only "
        "streams are seen"
    )


def report(fit: Refit, seen: Mapping[str, Any]) -> str:
    """The result, in a few lines."""
    old = [name for name in NAMES if name not in fit.identified]
    whose = "the present profile's" if seen["profile"] else "a generic machine's"
    lines = [
        f"instance {seen['instance']}: {fit.step_rows} rows of streams and {fit.first_token_rows} "
        "first tokens of requests that were alone",
        "  ".join(f"{name} {value:.3g}" for name, value in asdict(fit.constants).items()),
        f"on held-out rows: the time of streams is off by {_told(fit.decode)}, a first token by "
        f"{_told(fit.prefill)}",
    ]
    if old:
        lines.append(
            f"the traffic does not determine {', '.join(old)}: they are {whose}, scaled by what "
            "was observed"
        )
    return "\n".join(lines) + "\n"


def _source(fit: Refit, seen: Mapping[str, Any]) -> dict[str, Any]:
    errors = {"prefill": fit.prefill.median, "decode": fit.decode.median}
    return {
        "how": "measured",
        "date": datetime.now(UTC).date(),
        "note": f"from live traffic: {fit.step_rows} rows of streams, {fit.first_token_rows} first "
        "tokens; errors are medians over held-out rows, noise of the network included",
        "error": {name: rounded(e) for name, e in errors.items() if e is not None},
        "unidentified": [name for name in NAMES if name not in fit.identified],
    }


def _told(errors: Errors) -> str:
    if errors.median is None or errors.p90 is None:
        return "an unknown amount (no such row)"
    return f"{errors.median:.1%} (median; nine in ten by less than {errors.p90:.1%})"


def _rows(
    fields: Sequence[str], rows: Sequence[Sequence[Any]], kind: Any, caching: bool | None
) -> list[Any]:
    """Older rows lack ``hit_tokens``: known to be 0 without a prefix cache, or without a prompt."""
    if tuple(fields) not in (kind._fields, kind._fields[:-1]):
        raise ValueError(f"fields {fields}")
    result = []
    for row in rows:
        *values, hits = row if len(fields) == len(kind._fields) else (*row, None)
        made = kind(*map(float, values), math.nan if hits is None else float(hits))
        if hits is None and (caching is False or made.prompt_tokens == 0):
            made = made._replace(hit_tokens=0.0)
        result.append(made)
    return result
