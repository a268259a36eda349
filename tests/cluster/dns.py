"""CoreDNS as a Deployment behind the usual `kube-dns` Service, as clusters have it."""

from __future__ import annotations

from typing import Any

from tests.cluster.images import coredns_name
from tests.cluster.site import Site

NAMESPACE = "kube-system"
LABELS = {"k8s-app": "kube-dns"}

COREFILE = """.:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa {
        pods insecure
        ttl 5
    }
    forward . /etc/resolv.conf
    cache 5
    loadbalance
}
"""


def manifests(site: Site) -> list[dict[str, Any]]:
    """All its objects."""
    metadata = {"name": "coredns", "namespace": NAMESPACE}
    role = {
        "rules": [
            {
                "apiGroups": [""],
                "resources": ["endpoints", "services", "pods", "namespaces"],
                "verbs": ["list", "watch"],
            },
            {
                "apiGroups": ["discovery.k8s.io"],
                "resources": ["endpointslices"],
                "verbs": ["list", "watch"],
            },
        ]
    }
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "system:coredns"},
            **role,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:coredns"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "system:coredns"},
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"Corefile": COREFILE}},
        _deployment(metadata),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": NAMESPACE, "labels": LABELS},
            "spec": {
                "clusterIP": site.dns_address,
                "selector": LABELS,
                "ports": [
                    {"name": "dns", "port": 53, "protocol": "UDP"},
                    {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
                ],
            },
        },
    ]


def _deployment(metadata: dict[str, str]) -> dict[str, Any]:
    container = {
        "name": "coredns",
        "image": coredns_name(),
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsUser": 0,
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": LABELS},
            "template": {
                "metadata": {"labels": LABELS},
                "spec": {
                    "serviceAccountName": "coredns",
                    "priorityClassName": "system-cluster-critical",
                    "dnsPolicy": "Default",
                    "terminationGracePeriodSeconds": 2,
                    "containers": [container],
                    "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
                },
            },
        },
    }
