"""``gateway.yaml`` and the profile files that it names, ready for ``hetero-gateway serve``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.deploy.command import KV_CONNECTOR
from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions
from hetero_gateway.engines.vllm.kv_transfer import DEFAULT_LEASE_S
from hetero_gateway.files import profile_file
from hetero_gateway.planner.plan import InstanceType

# The environment variables of its keys, if it has any.
API_KEY_ENV, ADMIN_KEY_ENV = "HETERO_GATEWAY_API_KEY", "HETERO_GATEWAY_ADMIN_KEY"
_SOURCE_KEYS = ("how", "date", "note", "engine", "quantization", "unidentified")
# How a KV capacity was measured; stated only if the capacity is that one.
_CAPACITY_KEYS = ("gpu_memory_utilization", "kv_cache_dtype")


def profile_files(
    instances: Sequence[DeployedInstance], options: DeploymentOptions
) -> dict[str, str]:
    """Path to text of every profile, one per instance type."""
    files = {}
    for instance in {each.profile_file: each for each in instances}.values():
        files[instance.profile_file] = _profile_text(instance.type, 1.0)
        if instance.gateway_profile_file != instance.profile_file:
            text = _profile_text(instance.type, options.time_scale)
            files[instance.gateway_profile_file] = text
    return files


def _profile_text(instance_type: InstanceType, speed: float) -> str:
    """The text of a profile, for an instance that is this many times faster."""
    profile = instance_type.profile
    source = _source(instance_type, profile, speed)
    document = profile_file.profile_document(profile, source, speed=speed)
    return (
        f"# {profile.name}: step times are {source['how']}, known to about "
        f"{instance_type.time_uncertainty:.0%}; KV capacity {instance_type.memory.how}, to about "
        f"{instance_type.memory.uncertainty:.0%}.\n" + profile_file.profile_text(document)
    )


def _source(instance_type: InstanceType, profile: Profile, speed: float) -> dict[str, Any]:
    source: dict[str, Any] = {"how": "derived"}
    capacity_keys = _CAPACITY_KEYS if instance_type.memory.how == "measured" else ()
    keys = (*_SOURCE_KEYS, *capacity_keys)
    source |= {key: profile.source[key] for key in keys if profile.source.get(key)}
    if speed != 1:
        source["note"] = f"{profile.name} at {speed:g} times its speed"
    error = {str(k): float(v) for k, v in dict(profile.source.get("error") or {}).items()}
    if not error:
        error = {"time": float(instance_type.time_uncertainty)}
    return source | {"error": error}


def gateway_text(
    instances: Sequence[DeployedInstance],
    options: DeploymentOptions,
    policy: str,
    *,
    base_url: Callable[[DeployedInstance], str],
    comment: str,
    server: dict[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    splits: bool = False,
) -> str:
    """The gateway's configuration, for instances at the addresses that ``base_url`` returns.

    ``more``: further sections. ``splits``: split requests where the plan found a gain.
    """
    document: dict[str, Any] = {
        "server": {"host": "127.0.0.1", "port": options.gateway_port} | (server or {}),
        "scheduler": {"policy": policy},
        "instances": [
            {
                "id": instance.id,
                "base_url": base_url(instance),
                "model": options.served_model_name,
                "profile": instance.gateway_profile_file,
                **(_kv_transfer(instance, options) if splits else {}),
            }
            for instance in instances
        ],
    }
    if splits and any(instance.kv_group for instance in instances):
        document["scheduler"] |= {"split_requests": "roles"}
        limits = {name: limit for name, limit in options.slo.items() if limit is not None}
        if limits:
            # Roles are decided by these limits; as in the plan, late requests are not refused.
            document["scheduler"] |= {"slo": limits, "queue": {"shed_by_slo": False}}
    if options.priors is not None:
        prompt, output = options.priors
        document["scheduler"] |= {
            "reference_prompt_tokens": max(1, round(prompt)),
            "reference_output_tokens": max(1, round(output)),
            "predictor": {"mean_tokens": float(f"{output:.1f}")},
        }
    return commented(comment) + dumped({**document, **(more or {})})


def _kv_transfer(instance: DeployedInstance, options: DeploymentOptions) -> dict[str, Any]:
    transfers, scale = instance.transfers, options.time_scale
    if instance.kv_group is None or transfers is None:
        return {}
    told: dict[str, Any] = {
        "connector": KV_CONNECTOR,
        "group": instance.kv_group,
        "gbit_per_s": transfers.gbit_per_s * scale,
        "start_s": transfers.link.start_s / scale,
        "kv_bytes_per_token": transfers.kv_bytes_per_token,
    }
    if scale != 1:
        told["lease_s"] = DEFAULT_LEASE_S / scale
    return {"kv_transfer": told}


def own_address(instance: DeployedInstance) -> str:
    """The address outside of containers."""
    return f"http://{instance.host}:{instance.port}"


def commented(text: str) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def dumped(document: Any) -> str:
    """YAML in the given order; deterministic for the same document."""
    text: str = yaml.dump(
        document, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True, width=100
    )
    return text
