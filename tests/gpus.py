"""The GPU of this machine, where it has one.

All tests but those that ask for it are about CPUs, or about GPUs that are scripted: they compute on the CPU
on every machine, and two ranks of theirs never look for two GPUs. So the driver's are hidden from all that
tests start, and shown again to what is started with `gpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VISIBLE = "CUDA_VISIBLE_DEVICES"
RANKS_ON_GPU = "RANKS_ON_GPU"
"""Set: what a rank server forks computes on the first GPU, all ranks on that one."""
DRIVER = Path("/dev/nvidiactl")
"""There where the kernel has NVIDIA's driver."""
_AVAILABLE = "import sys, torch; sys.exit(not torch.cuda.is_available())"


def hide() -> None:
    """From this process and all that it starts; nothing changes on a machine without a driver."""
    if DRIVER.exists():
        os.environ[VISIBLE] = ""


def apart(rank: int) -> dict[str, str]:
    """For the environment of a rank that shares a GPU with others. NCCL refuses two ranks on one GPU, unless
    they say that they are on two machines: then they meet by way of the network."""
    return {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}


def of_rank(rank: int) -> dict[str, str]:
    """For the environment of a rank of a test."""
    return {VISIBLE: "0", **apart(rank)} if os.environ.get(RANKS_ON_GPU) else {}


@pytest.fixture(scope="session")
def gpu() -> dict[str, str]:
    """What shows the first GPU to a process that is started with it."""
    if not DRIVER.exists():
        pytest.skip("needs a GPU: there is no NVIDIA driver on this machine")
    shown = {VISIBLE: "0"}
    asked = [sys.executable, "-c", _AVAILABLE]
    if subprocess.run(asked, env={**os.environ, **shown}, check=False).returncode:
        pytest.skip("needs a GPU that PyTorch can use: torch.cuda.is_available() is false")
    return shown
