"""What each accelerator vendor needs: how devices are named, divided and given to a container.

The data is in ``templates/vendors.yaml``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_gateway.deploy.template import filled, pieces


@dataclass(frozen=True, slots=True)
class Vendor:
    """One vendor.

    Args:
        image_variable: overrides the image in the compose file.
        compose: keys of a compose service, with places for the devices.
        prefix: of its accelerators' names.
        visible_devices: environment variable that hides the other devices from a process.
        kubernetes_resource: its device plugin's name for one device; None: none is needed.
        image: its vLLM image; None: there is no common one, the user has to name it.
    """

    name: str
    image_variable: str
    compose: dict[str, Any] = field(hash=False)
    prefix: str | None = None
    visible_devices: str | None = None
    kubernetes_resource: str | None = None
    image: str | None = None

    @property
    def kubernetes_image(self) -> str:
        """The image, or a name that no registry has, so that nothing wrong is pulled."""
        return self.image or f"replace-me/{self.image_variable.lower().replace('_', '-')}:latest"

    def compose_image(self) -> str:
        """With its variable, which is required if there is no common image."""
        if self.image is None:
            return f"${{{self.image_variable}:?name an image of vLLM for {self.name}}}"
        return f"${{{self.image_variable}:-{self.image}}}"

    def compose_devices(self, devices: Sequence[int]) -> Any:
        """Keys of a compose service that give it these devices of the host, and no others."""
        nodes = [f"/dev/davinci{d}" for d in devices]
        nodes += ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
        ids = [str(d) for d in devices]
        values = {"ids": ids, "listed": ",".join(ids), "davinci": [f"{n}:{n}" for n in nodes]}
        return filled(self.compose, values)


_VENDORS = {name: Vendor(name, **keys) for name, keys in pieces("vendors.yaml").items()}
EMULATED = _VENDORS["emulated"]


def vendor_of(accelerator: str) -> Vendor:
    """The vendor of a catalogue accelerator, by name; NVIDIA if no other matches."""
    folded = accelerator.casefold()
    made_by = (v for v in _VENDORS.values() if v.prefix and folded.startswith(v.prefix))
    return next(made_by, _VENDORS["NVIDIA"])
