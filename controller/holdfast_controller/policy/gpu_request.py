"""What a number of GPUs is called in a pod's resources.

Kubernetes counts devices in whole numbers and refuses `nvidia.com/gpu: 0.25`. A share is therefore one
`nvidia.com/gpu.shared`, as the NVIDIA device plugin advertises time slices (`renameByDefault`), on a node
whose GPUs are cut into exactly that many: GPU feature discovery writes it in a label. A MIG profile has a
resource of its own, `nvidia.com/mig-1g.10gb` (the plugin's strategy `mixed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

WHOLE = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"
MIG = "nvidia.com/mig-"
GPUS = (WHOLE, MIG)
"""How the names of all of them begin: a slice in time has one that goes on (`.shared`)."""
SLICES_LABEL = "nvidia.com/gpu.replicas"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
"""Which GPUs of its node NVIDIA's container runtime shows a container, whatever its pod asked for. The device
plugin says it where the pod asks for some, and the pod's own environment wins over that; where neither does,
its image says it, and CUDA's say `all`."""
NO_DEVICES = "void"


@dataclass(frozen=True)
class GpuRequest:
    """`resource` and `count` for one pod, both empty on CPU."""

    resource: str = ""
    count: int = 0
    slices: int | None = None
    """Into how many the node's GPUs must be cut; None for whole GPUs, MIG devices and on CPU."""
    part: bool = False
    """Two of them may be parts of one GPU."""

    @property
    def on_gpu(self) -> bool:
        return self.count > 0

    @property
    def resources(self) -> dict[str, str]:
        return {self.resource: str(self.count)} if self.on_gpu else {}


def gpu_request(gpus: str, mig: str | None = None) -> GpuRequest:
    """From a job's `gpus` and `mig`, which spec.py has checked: 0, a whole number, or 1/N as a decimal."""
    amount = Fraction(gpus)
    if mig:
        return GpuRequest(f"{MIG}{mig}", int(amount), part=True)
    if amount == 0:
        return GpuRequest()
    if amount < 1:
        return GpuRequest(SHARED, 1, amount.denominator, part=True)
    return GpuRequest(WHOLE, int(amount))


def sharing_notes(gpus: str) -> tuple[str, ...]:
    """What somebody who asks for a share must know; () for whole GPUs and on CPU."""
    slices = gpu_request(gpus).slices
    if slices is None:
        return ()
    return (
        f"1/{slices} of a GPU is a slice of its time: who shares the GPU shares its memory, of which any can "
        "take all, and a fault of one ends all.",
    )
