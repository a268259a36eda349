"""What Kubernetes said of a job's pods while it was hit: the documents that a verdict was made of.

They are watched, not asked for: in the moment of the verdict the pods are let go. Of every version that was
told the last one before the verdict counts, by resourceVersion, which grows over all objects of a cluster.
What names the machine, or says nothing of how a pod ended, is left out.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.faults.kinds import KIND
from tests.cluster.kubectl import Kubectl
from tests.waiting import wait_until

Document = dict[str, Any]
KINDS = ("pods", KIND.attempt.resource.plural, "trainingjobs")
FINALIZER = "holdfast.dev/evidence"
_NAMES = ("name", "labels", "annotations", "finalizers")
_TIMES = ("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
_DROPPED = (
    "holdfast.dev/job-uid",
    "holdfast.dev/log-tail",
    "containerID",
    "lastProbeTime",
    "observedGeneration",
    "batch.kubernetes.io/controller-uid",
    "controller-uid",
)
_DROPPED_PREFIX = "jobset.sigs.k8s.io/"
_ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b")
SOME_ADDRESS = "192.0.2.1"
"""One of those that are there for examples (RFC 5737)."""
_REGISTRY = re.compile(r"\bregistry[\w-]*(?:\.[\w-]+)+")
SOME_REGISTRY = "registry.example"


class Witness:
    """The versions of a job's documents that were told so far, in files."""

    def __init__(self, directory: Path, job: str):
        self._directory = directory
        self._job = job

    def told(self, kind: str) -> list[Document]:
        """Every version of every object, in the order in which they were told."""
        text = (self._directory / kind).read_text()
        decoder, found, at = json.JSONDecoder(), [], 0
        while at < len(text):
            try:
                document, end = decoder.raw_decode(text, at)
            except ValueError:
                break  # the last one is being written
            found.append(document)
            at = end + len(text[end:]) - len(text[end:].lstrip())
        return [one for one in found if _label(one, "job") == self._job or kind == "trainingjobs"]

    def of_verdict(self, attempt: int) -> Document | None:
        """Pods and attempt object of an attempt as they were when it got its verdict, and the record."""
        judged = ((job, _record(job, attempt)) for job in self.told("trainingjobs"))
        version, record = next(
            ((_version(job), record) for job, record in judged if record.get("verdict")), (0, {})
        )
        if not record:
            return None
        pods = self._last("pods", attempt, version)
        objects = self._last(KIND.attempt.resource.plural, attempt, version)
        return {
            "pods": [_pod(pod) for pod in pods if FINALIZER in pod["metadata"].get("finalizers", ())],
            "attemptObject": next((_attempt_object(one) for one in objects), None),
            "record": {key: record[key] for key in ("verdict", "reason", "ending") if key in record},
        }

    def _last(self, kind: str, attempt: int, version: int) -> list[Document]:
        before = [
            one
            for one in self.told(kind)
            if _label(one, "attempt") == str(attempt) and _version(one) < version
        ]
        newest = {one["metadata"]["name"]: one for one in before}
        return [newest[name] for name in sorted(newest)]


@contextmanager
def witness(kubectl: Kubectl, namespace: str, job: str, directory: Path) -> Iterator[Witness]:
    """Watches while this holds; what there is now has been told when it is entered."""
    directory.mkdir(parents=True, exist_ok=True)
    watches = []
    try:
        for kind in KINDS:
            which = [job] if kind == "trainingjobs" else [f"-l=holdfast.dev/job={job}"]
            words = [kubectl.binary, f"--kubeconfig={kubectl.kubeconfig}", "get", kind, *which]
            with (directory / kind).open("w") as output:
                watches.append(
                    subprocess.Popen([*words, f"-n={namespace}", "--watch", "-o=json"], stdout=output)
                )
        wait_until(lambda: all((directory / kind).stat().st_size for kind in KINDS), "the watches")
        yield Witness(directory, job)
    finally:
        for watch in watches:
            watch.kill()
            watch.wait()


def nameless(document: Document, names: dict[str, str]) -> Document:
    """Without addresses and a registry's host, and with other `names` in the place of the machine's own."""
    text = _REGISTRY.sub(SOME_REGISTRY, _ADDRESS.sub(SOME_ADDRESS, json.dumps(document)))
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, names[name])
    changed: Document = json.loads(text)
    return changed


def _pod(pod: Document) -> Document:
    status = pod["status"]
    told = {
        key: status[key] for key in ("phase", "reason", "message", "startTime", "conditions") if key in status
    }
    containers = [
        {key: one[key] for key in ("name", "state", "resources") if key in one}
        for one in status.get("containerStatuses", [])
    ]
    where = {key: pod["spec"][key] for key in ("nodeName",) if key in pod["spec"]}
    return {
        "metadata": _metadata(pod),
        "spec": where,
        "status": _without({**told, "containerStatuses": containers}),
    }


def _attempt_object(document: Document) -> Document:
    spec = document["spec"]
    return {
        "kind": document["kind"],
        "metadata": _metadata(document),
        "spec": {key: spec[key] for key in KIND.attempt.suspend[:1] if key in spec},
        "status": {"conditions": document.get("status", {}).get("conditions", [])},
    }


def _metadata(document: Document) -> Document:
    meta = document["metadata"]
    kept: Document = _without({key: meta[key] for key in (*_NAMES, *_TIMES) if key in meta})
    return kept


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without(one)
            for key, one in value.items()
            if key not in _DROPPED and not key.startswith(_DROPPED_PREFIX)
        }
    return [_without(one) for one in value] if isinstance(value, list) else value


def _label(document: Document, name: str) -> str | None:
    label: str | None = (document["metadata"].get("labels") or {}).get(f"holdfast.dev/{name}")
    return label


def _version(document: Document) -> int:
    return int(document["metadata"]["resourceVersion"])


def _record(job: Document, attempt: int) -> Document:
    records = (job.get("status") or {}).get("attempts") or []
    return next((record for record in records if record["number"] == attempt), {})
