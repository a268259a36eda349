"""Pods run, find each other by name, and reach the API: what every later test takes for granted."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]


def pod(name: str, image: str, script: str, **spec: Any) -> dict[str, Any]:
    """A pod that runs a shell script and is ready for nothing else; it ends at once when asked to."""
    container = {"name": "main", "image": image, "command": ["sh", "-c", script]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            **spec,
        },
    }


def finish(cluster: Cluster, namespace: str, name: str) -> str:
    """Log of a pod that must succeed."""
    cluster.kubectl.run(
        "wait", f"-n={namespace}", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=300s"
    )
    return cluster.kubectl.run("logs", f"-n={namespace}", name)


def test_a_pod_runs_to_its_end_and_its_log_is_kept(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl.apply(pod("hello", cluster.busybox, "echo hello from $(hostname)"), namespace=namespace)
    assert finish(cluster, namespace, "hello") == "hello from hello\n"


def test_a_termination_message_and_exit_code_reach_the_api(cluster: Cluster, namespace: str) -> None:
    script = "echo out of ink >/dev/termination-log; exit 7"
    cluster.kubectl.apply(pod("clerk", cluster.busybox, script), namespace=namespace)
    cluster.kubectl.run(
        "wait", f"-n={namespace}", "pod/clerk", "--for=jsonpath={.status.phase}=Failed", "--timeout=300s"
    )
    ended = cluster.kubectl.get("pod", "clerk", f"-n={namespace}")["status"]["containerStatuses"][0]["state"]
    assert ended["terminated"]["exitCode"] == 7
    assert ended["terminated"]["message"] == "out of ink\n"


def test_a_service_is_found_by_name_and_answers(cluster: Cluster, namespace: str) -> None:
    script = "mkdir /tmp/www; echo it is me >/tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www"
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    url = f"http://web.{namespace}.svc.cluster.local"
    again = "do sleep 0.2; done"
    asking = f"until wget -q -T 2 -O - {url} 2>/dev/null; {again}; until nslookup web; {again}"
    cluster.kubectl.apply(
        pod("server", cluster.busybox, script),
        service,
        pod("client", cluster.busybox, asking),
        namespace=namespace,
    )
    heard = finish(cluster, namespace, "client")
    address = cluster.kubectl.get("service", "web", f"-n={namespace}")["spec"]["clusterIP"]
    assert heard.startswith("it is me\n")
    assert address in heard


def test_a_pod_talks_to_the_api_with_its_own_rights(cluster: Cluster, namespace: str) -> None:
    script = (
        "cd /var/run/secrets/kubernetes.io/serviceaccount; "
        'until wget -q -O - --no-check-certificate --header "Authorization: Bearer $(cat token)" '
        f"https://kubernetes.default.svc/api/v1/namespaces/{namespace}/secrets 2>&1 | grep 403; "
        "do sleep 0.2; done"
    )
    cluster.kubectl.apply(pod("spy", cluster.busybox, script), namespace=namespace)
    assert "403" in finish(cluster, namespace, "spy")


def test_a_command_runs_in_a_pod_without_root(cluster: Cluster, namespace: str) -> None:
    secure = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    cluster.kubectl.apply(
        pod("safe", cluster.busybox, "sleep 1000", securityContext=secure), namespace=namespace
    )
    cluster.kubectl.run("wait", f"-n={namespace}", "pod/safe", "--for=condition=Ready", "--timeout=300s")
    assert cluster.kubectl.run("exec", f"-n={namespace}", "safe", "--", "id", "-u") == "65532\n"
