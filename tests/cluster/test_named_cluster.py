"""A cluster of the user's own, which KUBECONFIG_UNDER_TEST names: found, or told what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster import images
from tests.cluster.cluster import PUBLIC_BUSYBOX, named_cluster
from tests.cluster.control_plane import ControlPlane
from tests.cluster.errors import ClusterError

pytestmark = pytest.mark.cluster


def test_a_named_cluster_is_used_as_it_is(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BUSYBOX_IMAGE_UNDER_TEST", raising=False)
    there = named_cluster(control_plane.kubectl.kubeconfig)
    assert there.site is None  # nothing of it is ours to start, build into or take down
    assert there.is_up
    assert there.busybox == PUBLIC_BUSYBOX != images.BUSYBOX
    monkeypatch.setenv("BUSYBOX_IMAGE_UNDER_TEST", "registry.example.org/busybox:1")
    assert there.busybox == "registry.example.org/busybox:1"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"KUBECONFIG_UNDER_TEST=.*/none is no file; unset it to start"):
        named_cluster(tmp_path / "none")


def test_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(
        '{"apiVersion": "v1", "kind": "Config", "current-context": "x",'
        ' "contexts": [{"name": "x", "context": {"cluster": "x", "user": ""}}],'
        ' "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}]}'
    )
    with pytest.raises(ClusterError, match=r"of KUBECONFIG_UNDER_TEST=.* does not answer: .*127\.0\.0\.1:1"):
        named_cluster(file)
