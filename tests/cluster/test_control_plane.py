"""A Kubernetes API without nodes, on any machine: what needs no pod is tested on it."""

from __future__ import annotations

import json

import pytest
from tests.cluster import training_operator
from tests.cluster.component import names_of, running, start
from tests.cluster.control_plane import ControlPlane, start_control_plane
from tests.cluster.errors import ClusterError, ComponentFailed
from tests.cluster.kubectl import Kubectl
from tests.cluster.site import Site
from tests.cluster.tools import KUBERNETES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]  # the first time all is built


def test_it_is_the_version_that_is_pinned(control_plane: ControlPlane) -> None:
    if not control_plane.has_controllers:
        pytest.skip("KUBEBUILDER_ASSETS has no controllers, and is of whatever release")
    version = json.loads(control_plane.kubectl.run("version", "-o", "json"))
    assert version["serverVersion"]["gitVersion"] == KUBERNETES.version
    assert version["clientVersion"]["gitVersion"] == KUBERNETES.version


def test_its_controllers_work(control_plane: ControlPlane) -> None:
    if not control_plane.has_controllers:
        pytest.skip("KUBEBUILDER_ASSETS has no controllers, and is of whatever release")
    control_plane.kubectl.run("create", "namespace", "team-a")
    control_plane.kubectl.run("wait", "-n=team-a", "--for=create", "serviceaccount/default", "--timeout=300s")


@pytest.mark.parametrize(
    "words",
    [
        ["namespace", "default"],
        ["ns"],
        ["svc", "-A"],
        ["cm", "-n=kube-system"],
        ["configmaps", "-n=kube-system", "--field-selector=metadata.name=kube-root-ca.crt"],
        ["clusterroles", "-l=kubernetes.io/bootstrapping=rbac-defaults"],
        ["-n=kube-system", "role", "system:controller:bootstrap-signer"],
    ],
)
def test_what_is_read_is_what_kubectl_gets(control_plane: ControlPlane, words: list[str]) -> None:
    kubectl = control_plane.kubectl
    asked, read = json.loads(kubectl.run("get", *words, "-o=json")), kubectl.get(*words)
    if "items" not in asked:
        del read["metadata"]["managedFields"]
        assert read == asked
        return
    names = [[one["metadata"]["name"] for one in found["items"]] for found in (asked, read)]
    assert names[0] == names[1] != []


def test_what_cannot_be_read_says_why(control_plane: ControlPlane) -> None:
    kubectl = control_plane.kubectl
    with pytest.raises(ClusterError, match=r'404: pods "none" not found'):
        kubectl.get("pod", "none")
    with pytest.raises(ClusterError, match='no resource type "tjs"'):
        kubectl.get("tjs")
    with pytest.raises(ClusterError, match="--sort-by is not known here"):
        kubectl.get("pods", "--sort-by=.metadata.name")


def test_a_stranger_may_not_look(control_plane: ControlPlane) -> None:
    path = control_plane.authority.directory / "stranger.kubeconfig"
    control_plane.authority.kubeconfig(path, control_plane.url, "stranger", "stranger")
    done = Kubectl(path, control_plane.kubectl.binary).attempt("get", "secrets")
    assert done.returncode == 1
    assert 'User "stranger" cannot list resource "secrets"' in done.stderr


def test_pytorchjobs_can_be_stored_without_the_operator(control_plane: ControlPlane) -> None:
    kubectl = control_plane.kubectl
    training_operator.serve_crd(kubectl)
    replica = {"spec": {"containers": [{"name": "pytorch", "image": "any"}]}}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "job-1"},
        "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": replica}}},
    }
    kubectl.apply(job, namespace="default")
    assert kubectl.get("pytorchjob", "job-1", "-n=default")["spec"] == job["spec"]


def test_a_component_that_ends_says_why(short_lived: Site) -> None:
    component = start(short_lived, "clerk", ["sh", "-c", "echo no ink left; exit 3"])
    with pytest.raises(ComponentFailed, match=r"clerk ended with 3; .*/clerk\.log:\nno ink left"):
        component.wait_ready(lambda: False, 30)


def test_a_program_that_is_not_there_is_named(short_lived: Site) -> None:
    with pytest.raises(ComponentFailed, match=r"clerk does not start: /no/clerk: No such file"):
        start(short_lived, "clerk", ["/no/clerk"])


def test_two_stand_beside_each_other_and_leave_no_process(
    control_plane: ControlPlane, short_lived: Site
) -> None:
    from tests.cluster.component import end_all

    other = start_control_plane(short_lived)
    other.kubectl.run("create", "namespace", "only-here")
    assert control_plane.kubectl.attempt("get", "namespace", "only-here").returncode == 1
    assert {name for _, name in names_of(short_lived)} >= {"etcd", "kube-apiserver"}
    end_all(short_lived)
    assert running(short_lived) == []
    assert control_plane.kubectl.run("get", "--raw=/readyz") == "ok"
