"""Further nodes of a cluster that is up: each has namespaces, a containerd and a kubelet of its own.

They share this machine's disk, so a directory of it is the same storage on all of them. A new node gets the
images of the first one in a moment and for no room: containerd never changes a layer that it has unpacked,
nor a blob, so both may be links to the same files; only its two databases are copied, while the first
containerd stands still. What is built later is exported and imported.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from tests.cluster.component import Component, nodes_of, on_node
from tests.cluster.control_plane import running_control_plane
from tests.cluster.errors import ComponentFailed
from tests.cluster.images import ImageStore
from tests.cluster.machine import Machine, erase
from tests.cluster.node import start_containerd, start_kubelet, start_proxy, wait_node_ready
from tests.cluster.site import Site
from tests.cluster.system import run
from tests.waiting import wait_until

LINKED = ("io.containerd.content.v1.content", "io.containerd.snapshotter.v1.overlayfs")
DATABASES = (
    "io.containerd.metadata.v1.bolt/meta.db",
    "io.containerd.snapshotter.v1.overlayfs/metadata.db",
)


def join(site: Site) -> None:
    """Make a further node part of its cluster, which is up. Raises ComponentFailed."""
    plane = running_control_plane(site.node(1))
    erase(site.node_state)
    try:
        machine = Machine.start(site)
        take_images(site.node(1), site)
        containerd, _ = start_containerd(machine)
        kubelet, proxy = start_kubelet(machine, plane), start_proxy(machine, plane)
        wait_node_ready(site.node_name, plane.kubectl, kubelet)
        for component in (containerd, proxy):
            component.check()
    except BaseException:
        cut_power(site)
        raise


def cut_power(site: Site, seconds: float = 300) -> None:
    """End all that runs on a further node, at once and with no word to anybody. Raises ComponentFailed."""
    end = time.monotonic() + seconds
    while left := on_node(site):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)
        if time.monotonic() > end:
            raise ComponentFailed(f"{site.node_name} still has {left[0]} after {seconds:g} s of SIGKILL")


def take_images(source: Site, target: Site) -> None:
    """Fill the image store of a node whose containerd does not run with all that `source` has."""
    old, new = source.images / "containerd", target.images / "containerd"
    erase(new)
    with _standing_still(source):
        for name in LINKED:
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            run(["cp", "--archive", "--link", old / name, new / name], "linking images")
        for name in DATABASES:
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).unlink(missing_ok=True)
            shutil.copyfile(old / name, new / name)


@contextmanager
def _standing_still(site: Site) -> Iterator[None]:
    """The node's containerd stopped: its databases are then as a crash would leave them, which is whole."""
    stopped = on_node(site, "containerd")
    for process in stopped:
        process.suspend()
    try:
        stands = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
        wait_until(lambda: all(one.status() in stands for one in stopped), "containerd to stand still")
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def share_image(site: Site, name: str) -> None:
    """Give an image of the first node to the others, where they have not got it."""
    source = _images(site)
    for number in nodes_of(site)[1:]:
        target = _images(site.node(number))
        if target.digests().get(name) != source.digests()[name]:
            _send(source, target, name)


def _images(node: Site) -> ImageStore:
    return ImageStore(node, Machine.running(node).enter)


def _send(source: ImageStore, target: ImageStore, name: str) -> None:
    export = subprocess.Popen([*source.command, "images", "export", "-", name], stdout=subprocess.PIPE)
    command = [*target.command, "images", "import", "-"]
    done = subprocess.run(command, stdin=export.stdout, capture_output=True, text=True, check=False)
    if export.stdout is not None:
        export.stdout.close()  # or the one would wait for the other, where that has ended early
    if export.wait() or done.returncode:
        raise ComponentFailed(f"{name} does not get to {target.site.node_name}: {done.stderr.strip()}")


def restart_kubelet(site: Site) -> Component:
    """Start the kubelet of a node on which it has ended."""
    return start_kubelet(Machine.running(site), running_control_plane(site.node(1)))
