"""What lies between ranks has the rate that this machine tells, or none."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from gangs import Workshop
from gpt_runs import COMMAND, write_config

from holdfast_trainer.links import Link, judged, link_between

GPU = "0000:3b:00.0"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def interface(name: str, speed: str, *, state: str = "up", real: bool = True) -> dict[str, str]:
    """As sysfs-class-net(5) has it; what stands for hardware has a device."""
    files = {f"sys/class/net/{name}/speed": speed, f"sys/class/net/{name}/operstate": state}
    return {**files, **({f"sys/class/net/{name}/device/vendor": "0x15b3"} if real else {})}


ROUTE = "Iface\tDestination\tGateway\neth1\t0000D50A\t00000000\neth0\t00000000\t010200C0"
MACHINE = {
    "proc/net/route": ROUTE,
    **interface("lo", "", state="unknown", real=False),
    **interface("eth0", "10000"),
    **interface("eth1", "100000"),
    **interface("eth2", "400000", state="down"),
    **interface("veth0", "10000", real=False),
}
RDMA = {
    f"sys/class/infiniband/mlx5_{n}/ports/1/{name}": text
    for n in (0, 1)
    for name, text in (("rate", "400 Gb/sec (4X NDR)"), ("state", "4: ACTIVE" if n == 0 else "1: DOWN"))
}


def test_an_interface_has_the_rate_that_the_kernel_tells(tmp_path: Path) -> None:
    root = write(tmp_path, MACHINE)
    link = link_between(nccl=False, one_machine=False, environ={}, root=root)
    assert (link.name, link.bytes_per_second) == ("eth0", 1.25e9), "that of the default route"
    assert link.better == "GLOO_SOCKET_IFNAME=eth1", "and there is a faster one that is up"
    named = link_between(nccl=True, one_machine=False, environ={"NCCL_SOCKET_IFNAME": "=eth1"}, root=root)
    assert (named.name, named.bytes_per_second, named.better) == ("eth1", 12.5e9, "")
    virtual = {"GLOO_SOCKET_IFNAME": "veth"}
    link = link_between(nccl=False, one_machine=False, environ=virtual, root=root)
    assert (link.name, link.bytes_per_second) == ("veth0", None), "what a virtual one says is made up"
    link = link_between(nccl=False, one_machine=False, environ={}, root=tmp_path / "nothing")
    assert (link.name, link.bytes_per_second) == ("an interface that could not be told", None)


def test_rdma_is_what_nccl_takes_unless_it_may_not(tmp_path: Path) -> None:
    root = write(tmp_path, {**MACHINE, **RDMA})
    link = link_between(nccl=True, one_machine=False, environ={}, root=root)
    assert (link.kind, link.name, link.bytes_per_second) == ("rdma", "RDMA on mlx5_0", 50e9)
    off = link_between(nccl=True, one_machine=False, environ={"NCCL_IB_DISABLE": "1"}, root=root)
    assert (off.kind, off.name, off.better) == ("socket", "eth0", "NCCL_IB_DISABLE=0")
    assert link_between(nccl=False, one_machine=False, environ={}, root=root).kind == "socket", "gloo"


@pytest.mark.parametrize(
    ("ranks", "name", "rate"),
    [
        ("1", "RDMA on mlx5_1", 50e9),
        ("2", "RDMA on mlx5_1, mlx5_2", 100e9),
        ("8", "RDMA on mlx5_0, mlx5_1, mlx", 125e9),
    ],
)
def test_a_rank_is_rated_by_one_port_however_many_the_machine_has(
    tmp_path: Path, ranks: str, name: str, rate: float
) -> None:
    """A pod with one of eight GPUs sees the ports of all of them, and those of storage."""
    ports = {
        f"sys/class/infiniband/mlx5_{n}/ports/1/{file}": text
        for n, speed in enumerate((200, 400, 400))
        for file, text in (("rate", f"{speed} Gb/sec (4X NDR)"), ("state", "4: ACTIVE"))
    }
    environ = {"LOCAL_WORLD_SIZE": ranks}
    link = link_between(nccl=True, one_machine=False, environ=environ, root=write(tmp_path, ports))
    assert link.name.startswith(name)
    assert link.bytes_per_second == rate


def test_gpus_of_one_machine_are_linked_by_nvlink_or_else_pcie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi is a script here, which answers as NVIDIA's does; the idle slot runs at a lower speed."""
    slot = f"sys/bus/pci/devices/{GPU}"
    root = write(tmp_path, {f"{slot}/max_link_speed": "16.0 GT/s PCIe", f"{slot}/current_link_width": "16"})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    link = link_between(nccl=True, one_machine=True, pci=GPU, environ={}, root=root)
    assert (link.name, link.bytes_per_second) == ("PCIe at 16 GT/s x16", pytest.approx(31.5e9, rel=0.01))
    told = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n"
    told += "\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n\t Link 2: <inactive>"
    smi = tmp_path / "bin" / "nvidia-smi"
    write(tmp_path, {"bin/nvidia-smi": f"#!/bin/sh\n[ \"$4\" = {GPU} ] && echo '{told}'"})
    smi.chmod(0o755)
    link = link_between(nccl=True, one_machine=True, pci=GPU, environ={}, root=root)
    assert (link.name, link.bytes_per_second) == ("2 NVLinks", pytest.approx(53.124e9))
    unknown = link_between(nccl=True, one_machine=True, pci="0000:00:00.0", environ={}, root=root)
    assert (unknown.name, unknown.bytes_per_second) == ("PCIe, whose rate could not be told", None)


ETHERNET = Link("socket", "eth0", 1.25e9, setting="GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("measured", "link", "setting", "said"),
    [
        (1.0e9, ETHERNET, None, ""),
        (0.1e9, replace(ETHERNET, bytes_per_second=None), None, ""),
        (
            0.1e9,
            ETHERNET,
            "GLOO_SOCKET_IFNAME",
            "100 MB/s, 8% of the 1.25 GB/s that eth0 is rated for; see who",
        ),
        (
            0.1e9,
            replace(ETHERNET, better="GLOO_SOCKET_IFNAME=eth1"),
            "GLOO_SOCKET_IFNAME",
            "; try GLOO_SOCKET_IFNAME=eth1",
        ),
        (0.1e9, replace(ETHERNET, better="NCCL_IB_DISABLE=0"), "NCCL_IB_DISABLE", "; try NCCL_IB_DISABLE=0"),
        (9e9, Link("rdma", "RDMA on mlx5_0", 50e9), "NCCL_IB_HCA", "NCCL_DEBUG=INFO says whether NCCL tak"),
        (9e9, Link("nvlink", "18 NVLinks", 478e9), "NCCL_P2P_DISABLE", "2% of the 478 GB/s that 18 NVLinks"),
    ],
)
def test_far_below_the_rate_the_setting_is_named(
    measured: float, link: Link, setting: str | None, said: str
) -> None:
    found = judged(measured, link)
    assert (found and found[0]) == setting
    if found:
        assert said in found[1]


def test_ranks_of_one_machine_have_no_link_to_be_rated(workshop: Workshop, tmp_path: Path) -> None:
    arguments = ["diagnose", str(write_config(tmp_path)), "--steps", "1"]
    gang = workshop.start(script=COMMAND, ranks=2, arguments=arguments, env={"LOCAL_WORLD_SIZE": "2"})
    assert gang.wait(300) == [0, 0], gang.texts()
    said = "B/s all-reduce bus bandwidth over this machine's memory, which has no rated speed"
    assert said in gang.ranks[0].text()


def test_what_this_machine_tells_is_read() -> None:
    """Its own /sys: each interface that is up has a rate above nothing, or none."""
    link = link_between(nccl=False, one_machine=False, environ=os.environ)
    assert link.kind == "socket"
    assert link.bytes_per_second is None or link.bytes_per_second > 0
