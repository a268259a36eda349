"""The pods of a node, from a real apiserver: asked for seldom, with no right more than it takes."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.certificates import Authority
from tests.cluster.control_plane import ControlPlane
from waiting import wait_until

from holdfast_controller.exporter.pods import NodePods, from_apiserver, pods_of
from holdfast_controller.exporter.readings import Fault, Reason

NAMESPACE = "exporter-pods"


def pod(name: str, node: str, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "nodeName": node,
            "serviceAccountName": "exporter",
            "containers": [{"name": "main", "image": "example.org/none"}],
        },
    }


def node(name: str) -> dict[str, Any]:
    """Without one its pods would be collected."""
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}


def item(name: str, uid: str, container: str = "") -> dict[str, Any]:
    status = {"containerStatuses": [{"name": "main", "containerID": f"containerd://{container}"}]}
    return {"metadata": {"namespace": "a", "name": name, "uid": uid}, "status": status if container else {}}


def test_a_known_pod_is_not_asked_for_again() -> None:
    clock = [1000.0]
    there = [item("first", "1", "c" * 64)]
    asked: list[float] = []

    def fetch() -> list[dict[str, Any]]:
        asked.append(clock[0])
        return list(there)

    pods = NodePods(fetch, lambda: clock[0])
    for _ in range(3):
        found, fault = pods.covering({("1", "c" * 64)}, {("a", "first")})
        assert fault is None
        assert found.by_uid["1"].name == "first"
    assert asked == [1000.0]
    there.append(item("second", "2"))
    assert "2" not in pods.covering({("2", "")}, ())[0].by_uid, "asked a moment ago"
    clock[0] += 5
    assert "2" in pods.covering({("2", "")}, ())[0].by_uid
    clock[0] += 5
    assert pods.covering({("2", "d" * 64)}, ())[0].by_uid["2"].containers == {}
    assert len(asked) == 3, "the container has an id by now, perhaps"
    clock[0] += 120
    pods.covering((), ())
    assert len(asked) == 4, "names come to mean other pods"


def test_a_pod_that_notes_another_s_uid_is_not_that_one() -> None:
    """What the other did on its GPU was its own then, and the other's job idle, which may suspend it. Of a
    static pod a kubelet notes the uid itself, beside what the node's file says."""
    static = item("kube-proxy-n1", "3")
    static["metadata"]["annotations"] = {
        "kubernetes.io/config.hash": "8" * 32,
        "kubernetes.io/config.mirror": "8" * 32,
    }
    claims = item("claims", "2")
    claims["metadata"]["annotations"] = {"kubernetes.io/config.hash": "1"}
    mirrors = item("mirrors", "4")
    mirrors["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "1"}
    found = pods_of([item("gpt-1-worker-0", "1"), static, claims, mirrors])
    names = {uid: found.by_uid[uid].name for uid in ("1", "2", "8" * 32)}
    assert names == {"1": "gpt-1-worker-0", "2": "claims", "8" * 32: "kube-proxy-n1"}


def test_while_the_apiserver_is_away_what_is_known_stays_true_for_a_minute() -> None:
    clock = [1000.0]
    answers: list[Any] = [[item("first", "1")], OSError("connection refused"), OSError("connection refused")]

    def fetch() -> list[dict[str, Any]]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        found: list[dict[str, Any]] = answer
        return found

    pods = NodePods(fetch, lambda: clock[0])
    assert pods.covering({("1", "")}, ())[1] is None
    clock[0] += 10
    found, fault = pods.covering({("1", ""), ("2", "")}, ())
    assert fault == Fault(
        Reason.UNREACHABLE, "the apiserver does not list this node's pods: connection refused"
    )
    assert "1" in found.by_uid
    clock[0] += 120
    found, fault = pods.covering({("1", "")}, ())
    assert fault is not None
    assert found.by_uid == {}


def test_an_apiserver_that_answers_again_is_no_fault_any_more() -> None:
    """It was one for up to a minute, where the pod that was asked for in vain had gone meanwhile."""
    clock = [1000.0]
    away = [False]

    def fetch() -> list[dict[str, Any]]:
        if away[0]:
            raise OSError("connection refused")
        return [item("first", "1")]

    pods = NodePods(fetch, lambda: clock[0])
    assert pods.covering({("1", "")}, ())[1] is None
    away[0] = True
    clock[0] += 5
    assert pods.covering({("1", ""), ("2", "")}, ())[1] is not None
    away[0] = False
    clock[0] += 5
    assert pods.covering({("1", "")}, ())[1] is None


def test_an_apiserver_that_goes_within_its_answer_is_away_as_any_that_does_not_answer(tmp_path: Path) -> None:
    """What NVML and the kubelet say is served all the same."""
    Authority(tmp_path)
    (tmp_path / "token").write_text("secret")

    class Cut(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "4096")
            self.end_headers()
            self.wfile.write(b'{"items": [')

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Cut) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        fetch = from_apiserver(f"http://127.0.0.1:{server.server_port}", "node-a", tmp_path)
        found, fault = NodePods(fetch).covering({("1", "")}, ())
        server.shutdown()
    assert found.by_uid == {}
    assert fault is not None
    assert fault.reason == Reason.UNREACHABLE


@pytest.mark.cluster
def test_a_real_apiserver_lists_the_nodes_pods_to_who_may(
    control_plane: ControlPlane,
    tmp_path: Path,
) -> None:
    kubectl = control_plane.kubectl
    account = f"{NAMESPACE}:exporter"
    kubectl.run("create", "namespace", NAMESPACE)
    try:
        kubectl.run("create", "serviceaccount", "exporter", f"-n={NAMESPACE}")
        kubectl.apply(node("node-a"), node("node-b"), pod("ours", "node-a", app="x"), pod("theirs", "node-b"))
        token = kubectl.run("create", "token", "exporter", f"-n={NAMESPACE}").strip()
        (tmp_path / "token").write_text(token)
        (tmp_path / "ca.crt").write_bytes(Path(control_plane.authority.certificate).read_bytes())
        fetch = from_apiserver(control_plane.url, "node-a", tmp_path)
        _, fault = NodePods(fetch).covering((), ())
        assert fault is not None
        assert fault.reason == Reason.PERMISSION_DENIED
        assert "the exporter's account needs the verb list on pods" in fault.message
        kubectl.run("create", "clusterrole", NAMESPACE, "--verb=list", "--resource=pods")
        kubectl.run(
            *("create", "clusterrolebinding", NAMESPACE),
            *(f"--clusterrole={NAMESPACE}", f"--serviceaccount={account}"),
        )

        def listed() -> dict[tuple[str, str], Any]:
            """The apiserver's authorizer and its watch cache each take a moment."""
            return dict(NodePods(fetch).covering((), ())[0].by_name)

        found = wait_until(listed, "the pods to be listed")
        assert list(found) == [(NAMESPACE, "ours")]
        assert found[NAMESPACE, "ours"].labels == {"app": "x"}
        (tmp_path / "token").unlink()
        _, fault = NodePods(fetch).covering((), ())
        assert fault is not None
        assert f"{tmp_path}/token" in fault.message
    finally:
        kubectl.run("delete", "clusterrole,clusterrolebinding", NAMESPACE, "--ignore-not-found")
        kubectl.run("delete", "namespace", NAMESPACE, "--wait=false")
        kubectl.run("delete", "node", "node-a", "node-b", "--ignore-not-found")
