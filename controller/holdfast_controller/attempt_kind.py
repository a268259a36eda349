"""A kind of Kubernetes in which attempts are made, as a value: all that differs between two of them. Pure.

There is a module for each (pytorchjobs.py, trainjobs.py), and manifests.py lists them. Attempts are made in
the kind that the operator of the cluster has chosen (`jobs.kind`), and seen and ended in any: a change of
that setting finds attempts at work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .jobs import TrainingJob

Document = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    """A kind as the API serves it."""

    api_version: str
    kind: str
    plural: str

    @property
    def path(self) -> str:
        """Of those of all namespaces."""
        return f"{self._root}/{self.plural}"

    def within(self, namespace: str) -> str:
        """The path of those of one namespace."""
        return f"{self._root}/namespaces/{namespace}/{self.plural}"

    @property
    def crd(self) -> str:
        return f"{self.plural}.{self.api_version.partition('/')[0]}"

    @property
    def _root(self) -> str:
        return f"/{'apis' if '/' in self.api_version else 'api'}/{self.api_version}"


CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps")


@dataclass(frozen=True, eq=False)
class AttemptKind:
    """One attempt is one object of it, the attempt object, and the pods that its operator makes for that."""

    resource: Resource
    operator: str
    """Who makes the pods, as users know it."""
    beside: tuple[Resource, ...]
    """What is made before the attempt object, and has its name."""
    index_label: str
    """On a pod: the number of its replica. No pod of another kind has it."""
    container: str
    """Of the pod, in which torchrun is."""
    port: str
    """The name that the container's port for rendezvous must have."""
    longest_suffix: str
    """What is added at most to the name of the attempt object where that must fit a label of DNS."""
    address: Callable[[str], str]
    """Where replica 0 is found, by the name of the attempt object."""
    suspend: tuple[str, ...]
    """Where its spec says that it is not to have pods: keys, from the outside in."""
    maker: Callable[[str], tuple[str, str]]
    """Kind and name of the object whose Events tell why pods are not made; by the attempt object's name."""
    refused: str
    """The reason of such an Event."""
    nameless: str
    """Likewise, where replicas are not given the names by which they find each other."""
    has_made: Callable[[Mapping[str, Any]], bool]
    """Whether the status of an attempt object says that all pods were made, or that no more are."""
    documents: Callable[[TrainingJob, Document, Document], tuple[Document, ...]]
    """Of a job as of the attempt, metadata and the pods' template: all beside, then the attempt object."""
    ends_with_pods: bool = False
    """Whether no pod is made any more once all were made and have ended: then it stays where it is when it is
    ended. Else it has to go first."""
    beneath: str = ""
    """Another program, as users know it, without which the operator makes no pods; empty: there is none."""
    late: str = ""
    """What a refusal says that passes by itself a moment after what is beside was made; empty: none does."""

    def is_suspended(self, attempt_object: Mapping[str, Any]) -> bool:
        """Whether somebody, usually its queue, keeps it from having pods."""
        value: Any = attempt_object.get("spec")
        for key in self.suspend:
            value = (value or {}).get(key)
        return bool(value)
