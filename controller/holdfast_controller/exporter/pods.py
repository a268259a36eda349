"""The pods of this node, as the apiserver knows them: whose container is it, of which job and attempt.

Labels of a pod do not change in its life and containers get their ids once, so the list is kept and
fetched again only for a pod or container that is not in it, or after a fault, at most every
`REFRESH_SECONDS`; and every `FORGET_SECONDS` in any case, because a name can come to mean another pod.

Plain HTTPS with the pod's own account: a client library would cost more memory than all else here.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .readings import Fault, Reason

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_SECONDS = 2.0
REFRESH_SECONDS = 3.0
FORGET_SECONDS = 60.0
STATIC = "kubernetes.io/config.mirror"
"""A kubelet's note on what it shows of a static pod: the uid that its node made, which its processes carry.
A kubelet runs no pod that has it; whatever else a pod notes of itself, its user may have written."""


@dataclass(frozen=True)
class Pod:
    """What the exporter needs of one pod."""

    uid: str
    namespace: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    containers: Mapping[str, str] = field(default_factory=dict)
    """Name by container id, without the runtime's prefix."""


@dataclass(frozen=True)
class Pods:
    """All pods of the node, by both ways to name one."""

    by_uid: Mapping[str, Pod] = field(default_factory=dict)
    by_name: Mapping[tuple[str, str], Pod] = field(default_factory=dict)

    def knows(self, containers: Collection[tuple[str, str]], names: Collection[tuple[str, str]]) -> bool:
        """Whether all these (pod's uid, container's id) and (namespace, name) are there."""
        return all(name in self.by_name for name in names) and all(
            uid in self.by_uid and (not container or container in self.by_uid[uid].containers)
            for uid, container in containers
        )


def pods_of(items: list[dict[str, Any]]) -> Pods:
    """From the items of a PodList."""
    found, static = [], {}
    for item in items:
        metadata, status = item["metadata"], item.get("status", {})
        kinds = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
        statuses = [one for kind in kinds for one in status.get(kind) or ()]
        containers = {
            one["containerID"].rpartition("//")[2]: one["name"] for one in statuses if one.get("containerID")
        }
        pod = Pod(
            metadata["uid"], metadata["namespace"], metadata["name"], metadata.get("labels") or {}, containers
        )
        found.append(pod)
        if uid := (metadata.get("annotations") or {}).get(STATIC):
            static[uid] = pod
    # No note makes a pod another one.
    return Pods(static | {pod.uid: pod for pod in found}, {(pod.namespace, pod.name): pod for pod in found})


class NodePods:
    """The pods of one node, kept. Safe to call from several threads."""

    def __init__(
        self, fetch: Callable[[], list[dict[str, Any]]], clock: Callable[[], float] = time.monotonic
    ):
        """`fetch` lists them; it raises OSError, HTTPException or ValueError. `clock` gives seconds."""
        self._fetch = fetch
        self._clock = clock
        self._pods = Pods()
        self._lock = threading.Lock()
        self._tried = self._fetched = float("-inf")
        self._fault: Fault | None = None

    def covering(
        self, containers: Collection[tuple[str, str]], names: Collection[tuple[str, str]]
    ) -> tuple[Pods, Fault | None]:
        """The pods, fetched again where one of these is not among them, or they could not be fetched, and it
        is time to ask."""
        with self._lock:
            now = self._clock()
            old = now - self._fetched > FORGET_SECONDS
            # A fault is told until the apiserver answers: nobody but a fetch finds out that it does.
            wanted = old or self._fault is not None or not self._pods.knows(containers, names)
            if wanted and now - self._tried > REFRESH_SECONDS:
                self._tried = now
                try:
                    self._pods, self._fault = pods_of(self._fetch()), None
                    self._fetched = now
                except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                    self._fault = _fault(error)
                    if old:
                        self._pods = Pods()  # by now its names may mean other pods
            return self._pods, self._fault


def from_apiserver(url: str, node: str, account: Path = ACCOUNT) -> Callable[[], list[dict[str, Any]]]:
    """Lists the pods of `node` with the token and the authority in `account`."""
    query = urllib.parse.urlencode({"fieldSelector": f"spec.nodeName={node}", "resourceVersion": "0"})

    def fetch() -> list[dict[str, Any]]:
        token = (account / "token").read_text().strip()  # renewed by the kubelet
        context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        request = urllib.request.Request(
            f"{url}/api/v1/pods?{query}", headers={"Authorization": f"Bearer {token}"}
        )
        # The apiserver is in the cluster: whatever proxy the environment names is not on the way.
        direct = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with direct.open(request, timeout=TIMEOUT_SECONDS) as answer:
            items: list[dict[str, Any]] = json.load(answer)["items"]
            return items

    return fetch


def _fault(error: Exception) -> Fault:
    if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
        return Fault(
            Reason.PERMISSION_DENIED,
            f"the apiserver refuses the list of pods ({error.code}): the exporter's account needs the "
            "verb list on pods, which the chart's exporter.yaml gives",
        )
    return Fault(Reason.UNREACHABLE, f"the apiserver does not list this node's pods: {error}")
