"""What each make of accelerator wants: how devices are named, shared out and given to a container.

The commands' own words are vLLM's and the vendors'; only NVIDIA's and the emulated ones have been
run for this project, and the README of a written directory says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# The vLLM that these files are written for; the same as in docker/compose.vllm.yaml.
VLLM_IMAGE = "vllm/vllm-openai:v0.32.0"


@dataclass(frozen=True, slots=True)
class Vendor:
    """One make.

    Args:
        visible_devices: environment variable that hides the other devices from a process.
        kubernetes_resource: what its device plugin calls one device; None: none is needed.
        image: of vLLM for it; None: there is no common one, the user has to name it.
        image_variable: overrides the image in the compose file.
    """

    name: str
    visible_devices: str | None
    kubernetes_resource: str | None
    image: str | None
    image_variable: str

    @property
    def kubernetes_image(self) -> str:
        """The image, or a name that no registry has, so that nothing wrong is pulled."""
        return self.image or f"replace-me/{self.image_variable.lower().replace('_', '-')}:latest"

    def compose_image(self) -> str:
        """With its variable, which must be set where there is no common image."""
        if self.image is None:
            return f"${{{self.image_variable}:?name an image of vLLM for {self.name}}}"
        return f"${{{self.image_variable}:-{self.image}}}"

    def compose_devices(self, devices: Sequence[int]) -> dict[str, Any]:
        """Keys of a compose service that give it these devices of the host, and no others."""
        return _COMPOSE[self.name](tuple(devices))


NVIDIA = Vendor("NVIDIA", "CUDA_VISIBLE_DEVICES", "nvidia.com/gpu", VLLM_IMAGE, "VLLM_IMAGE")
AMD = Vendor("AMD", "HIP_VISIBLE_DEVICES", "amd.com/gpu", None, "VLLM_ROCM_IMAGE")
GAUDI = Vendor("Gaudi", "HABANA_VISIBLE_MODULES", "habana.ai/gaudi", None, "VLLM_GAUDI_IMAGE")
ASCEND = Vendor(
    "Ascend", "ASCEND_RT_VISIBLE_DEVICES", "huawei.com/Ascend910", None, "VLLM_ASCEND_IMAGE"
)
# A process that only stands for an instance: it needs no device.
EMULATED = Vendor("emulated", None, None, "hetero-gateway:local", "HETERO_GATEWAY_IMAGE")

_PREFIXES = (("mi", AMD), ("gaudi", GAUDI), ("ascend", ASCEND))


def vendor_of(accelerator: str) -> Vendor:
    """Who makes an accelerator of the catalogue; by its name, NVIDIA where no other fits."""
    folded = accelerator.casefold()
    return next((vendor for prefix, vendor in _PREFIXES if folded.startswith(prefix)), NVIDIA)


def _nvidia(devices: tuple[int, ...]) -> dict[str, Any]:
    reservation = {
        "driver": "nvidia",
        "device_ids": [str(d) for d in devices],
        "capabilities": ["gpu"],
    }
    return {"deploy": {"resources": {"reservations": {"devices": [reservation]}}}}


def _amd(devices: tuple[int, ...]) -> dict[str, Any]:
    # Every device node is passed in; the variable picks.
    return {
        "devices": ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"],
        "group_add": ["video"],
        "security_opt": ["seccomp:unconfined"],
        "environment": {"HIP_VISIBLE_DEVICES": _listed(devices)},
    }


def _gaudi(devices: tuple[int, ...]) -> dict[str, Any]:
    return {
        "runtime": "habana",
        "cap_add": ["SYS_NICE"],
        "environment": {"HABANA_VISIBLE_DEVICES": _listed(devices)},
    }


def _ascend(devices: tuple[int, ...]) -> dict[str, Any]:
    nodes = [f"/dev/davinci{d}" for d in devices]
    nodes += ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
    return {
        "devices": [f"{node}:{node}" for node in nodes],
        "volumes": [
            "/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro",
            "/usr/local/dcmi:/usr/local/dcmi:ro",
            "/usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro",
            "/etc/ascend_install.info:/etc/ascend_install.info:ro",
        ],
    }


_COMPOSE: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "NVIDIA": _nvidia,
    "AMD": _amd,
    "Gaudi": _gaudi,
    "Ascend": _ascend,
    "emulated": lambda devices: {},
}


def _listed(devices: tuple[int, ...]) -> str:
    return ",".join(str(d) for d in devices)
