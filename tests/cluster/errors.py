"""What can go wrong with the tests' own Kubernetes.

ClusterError
├── MissingTool        a program is not there and cannot be made here
├── BuildFailed        the Go compiler said no
├── ComponentFailed    a component ended, or did not become ready in time
├── NoRoom             the disk is too full for what was about to be put there
└── CannotRunNode      this machine can run a control plane, but no pods
"""

from __future__ import annotations


class ClusterError(Exception):
    """Base of all errors here; the message names the remedy."""


class MissingTool(ClusterError):
    """A program is not there and cannot be made here."""


class BuildFailed(ClusterError):
    """A tool could not be built."""


class ComponentFailed(ClusterError):
    """A component ended, or did not become ready in time; the message carries the end of its log."""


class NoRoom(ClusterError):
    """The disk is too full for what was about to be put there."""


class CannotRunNode(ClusterError):
    """No root or no container runtime: a control plane can run here, pods cannot."""
