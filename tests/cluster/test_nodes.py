"""Several nodes on one machine: pods on different ones meet as they do anywhere, and nothing stays behind."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.cluster.cluster import Cluster, down, status, up
from tests.cluster.component import nodes_of
from tests.cluster.errors import ClusterError
from tests.cluster.machine import Machine, why_no_node
from tests.cluster.site import Site, site
from tests.cluster.test_down import Host, before, left, look
from tests.cluster.test_node import finish, pod

__all__ = ["before"]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(why_no_node()), reason=why_no_node()),
]


def test_a_cluster_has_one_to_four_nodes() -> None:
    with pytest.raises(ClusterError, match="there is no node 5: a cluster has 1 to 4, numbered from 1"):
        up(site("any"), nodes=5)


def test_nodes_do_not_meet_in_any_name_or_address() -> None:
    nodes = [site("any").node(number) for number in range(1, 5)]
    for what in ("node_name", "node_state", "images", "containerd_socket", "cgroup", "link", "node_address"):
        assert len({getattr(node, what) for node in nodes}) == 4, what
    for one, other in pairwise(nodes):
        assert not one.node_pods.overlaps(other.node_pods)
        assert not one.cable.overlaps(other.cable)
    assert all(node.node_pods.subnet_of(node.pods) and len(node.link) <= 15 for node in nodes)
    assert len({node.state for node in nodes}) == 1, "what is running is found by one mark"


def on(node: Site, name: str, there: Cluster, script: str) -> dict[str, Any]:
    """A pod of that node."""
    return pod(name, there.busybox, script, nodeSelector={"kubernetes.io/hostname": node.node_name})


def test_pods_of_two_nodes_find_each_other_and_nothing_is_left_of_either(
    short_lived: Site, before: Host
) -> None:
    """One life of a cluster: a pod on its node, a second node, pods on both, and its end with all these."""
    there = up(short_lived, operator=False, say=lambda _: None)
    assert nodes_of(short_lived) == [1]
    assert status(short_lived).startswith(f"cluster {short_lived.name} is up: ")
    there.kubectl.apply(pod("held", there.busybox, "exec sleep 1000"), namespace="default")
    there.kubectl.run("wait", "pod/held", "--for=condition=Ready", "--timeout=300s")
    of_one = left(short_lived, before, look(short_lived))
    assert f"links: {short_lived.link}" in of_one
    assert len([item for item in of_one if item.startswith("rules: ")]) == 3
    assert not [item for item in of_one if item.startswith("mounts: ")], "mounts are in the node's namespace"
    assert [item for item in of_one if item.startswith("cgroups: ")]

    machine = Machine.running(short_lived).pid
    up(short_lived, nodes=2, operator=False, say=lambda _: None)
    assert Machine.running(short_lived).pid == machine, "up finds what is up"
    nodes = [short_lived.node(number) for number in (1, 2)]
    assert nodes_of(short_lived) == [1, 2]

    web = "mkdir /tmp/www; hostname >/tmp/www/name; exec httpd -f -p 8080 -h /tmp/www"
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    there.kubectl.apply(on(nodes[1], "server", there, web), service, namespace="default")
    there.kubectl.run("wait", "pod/server", "--for=condition=Ready", "--timeout=300s")
    address = there.kubectl.get("pod", "server")["status"]["podIP"]
    for node in nodes:
        asking = (
            f"for url in http://web.default.svc.cluster.local http://{address}:8080; do "
            'until wget -q -T 2 -O - "$url/name" 2>/dev/null; do sleep 0.2; done; done'
        )
        there.kubectl.apply(on(node, f"client-{node.number}", there, asking), namespace="default")
    for node in nodes:
        assert finish(there, "default", f"client-{node.number}") == "server\nserver\n"
    links = [item for item in left(short_lived, before, look(short_lived)) if item.startswith("links: ")]
    assert sorted(links) == [f"links: {node.link}" for node in nodes]

    assert there.is_up
    down(short_lived)
    assert left(short_lived, before, look(short_lived)) == []
    assert status(short_lived) == f"cluster {short_lived.name} is down"
    down(short_lived)
    assert left(short_lived, before, look(short_lived)) == [], "down may come twice"
