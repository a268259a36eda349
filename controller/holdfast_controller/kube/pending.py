"""Why a pod has not started, as far as its status and what was told of it say. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast_controller.jobs import Verdict
from holdfast_controller.policy.slow_start import SlowStart
from holdfast_controller.policy.waits import explain_wait

from .pod_state import (
    Document,
    before_it,
    condition_of,
    container_state,
    init_container,
    is_wanted,
    node_of,
)

Slow = Mapping[str, SlowStart]
"""What keeps pods from starting that have their node, by uid; see slow_starts.py."""

_NO_IMAGE = (
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RegistryUnavailable",
    "SignatureValidationFailed",
)
_STUCK = (*_NO_IMAGE, "CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_STUCK_BEFORE_IT = (*_STUCK, "CrashLoopBackOff")
"""Of an init container that stays, a sidecar, which is started again and again."""


def creating(pod: Document) -> bool:
    """Whether it has its node and has yet to start, and its status says nothing of why."""
    if node_of(pod) is None or not is_wanted(pod):
        return False
    state = container_state(pod)
    waiting = state.get("waiting")
    return not state if waiting is None else waiting.get("reason") not in _STUCK


def why_pending(pod: Document, slow: Slow) -> str:
    """In a sentence, with what would help; empty where nothing is known to be in its way."""
    waiting = container_state(pod).get("waiting") or {}
    if waiting.get("reason") in _STUCK:
        return explain_wait(f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": "))
    if first := _stuck_before_it(pod):
        wait = first["state"]["waiting"]
        said = f"{init_container(first)}: {wait['reason']}: {wait.get('message', '')}"
        return explain_wait(said.rstrip(": "))
    if (start := _slow_start(pod, slow)) is not None:
        first = before_it(pod) if not start.reason else {}
        return explain_wait(f"{init_container(first)} is not done") if first else start.reason
    condition = condition_of(pod, "PodScheduled")
    if condition.get("status") != "False":
        return ""
    return explain_wait(f"{condition.get('reason', 'Pending')}: {condition.get('message', '')}".rstrip(": "))


def stuck(pod: Document, slow: Slow) -> Verdict | None:
    """What keeps it from starting, where that is its place's or the image's."""
    reason = (container_state(pod).get("waiting") or {}).get("reason")
    if reason in _STUCK:
        return Verdict.IMAGE_PULL if reason in _NO_IMAGE else Verdict.UNSCHEDULABLE
    if first := _stuck_before_it(pod):
        no_image = first["state"]["waiting"]["reason"] in _NO_IMAGE
        return Verdict.IMAGE_PULL if no_image else Verdict.UNSCHEDULABLE
    start = _slow_start(pod, slow)
    if start is not None and start.fails:
        return Verdict.UNSCHEDULABLE
    return Verdict.UNSCHEDULABLE if condition_of(pod, "PodScheduled").get("status") == "False" else None


def _stuck_before_it(pod: Document) -> Document:
    """The status of an init container that cannot start, or go on; empty where none is in the way."""
    first = before_it(pod)
    waiting = (first.get("state") or {}).get("waiting") or {}
    return first if waiting.get("reason") in _STUCK_BEFORE_IT else {}


def _slow_start(pod: Document, slow: Slow) -> SlowStart | None:
    return slow.get(pod["metadata"]["uid"]) if slow and creating(pod) else None
