"""What a drill cannot do on a cluster is refused with the reason and with what can be done."""

from __future__ import annotations

import pytest

from holdfast_controller.cluster import Invalid
from holdfast_controller.drills import DrillKind
from holdfast_controller.kube.taking import refuse
from holdfast_controller.pod_settings import PodSettings


@pytest.mark.parametrize("kind", [DrillKind.FREEZE, DrillKind.OOM])
def test_what_runs_a_program_in_a_pod(kind: DrillKind) -> None:
    said = rf"{kind.value}: it runs a program .* \(jobs.execInPods in the chart's values\): try kill, notice"
    with pytest.raises(Invalid, match=said):
        refuse(kind, PodSettings(drill_nodes=True))
    refuse(kind, PodSettings(exec_in_pods=True))


def test_a_node_that_others_use_too() -> None:
    with pytest.raises(Invalid, match=r"node: it cordons .* \(jobs.drillNodes in the chart's values\): try"):
        refuse(DrillKind.NODE, PodSettings(exec_in_pods=True))
    refuse(DrillKind.NODE, PodSettings(drill_nodes=True))


@pytest.mark.parametrize("kind", [DrillKind.EVICT, DrillKind.NOTICE, DrillKind.KILL])
def test_what_can_always_be_done(kind: DrillKind) -> None:
    refuse(kind, PodSettings())
