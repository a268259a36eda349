"""Which of a job's own labels its pods get: those that the operator lets through, by name.

A label of a pod is more than a word. By it Services send a pod what is meant for others, NetworkPolicies let
it pass, and controllers take it for theirs; so none goes through unless its name was allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .wildcards import wild

OURS = "holdfast.dev"
PLATFORMS = ("kubernetes.io", "k8s.io", "x-k8s.io", "kubeflow.org")
"""Domains whose labels mean something to Kubernetes and its operators; a pattern must name them in full."""


def passed_on(labels: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Those whose names a pattern covers, `team` or `cost.example.org/*`; never ours."""
    return {name: value for name, value in labels.items() if any(_covers(one, name) for one in patterns)}


def _covers(pattern: str, name: str) -> bool:
    domain, _, word = name.rpartition("/")
    if _within(domain, OURS):
        return False
    if name == pattern:
        return True
    allowed, _, words = pattern.rpartition("/")
    if allowed != domain or "*" in allowed or any(_within(domain, one) for one in PLATFORMS):
        return False
    return re.fullmatch(wild(words, ".*"), word) is not None


def _within(domain: str, other: str) -> bool:
    return domain == other or domain.endswith(f".{other}")
