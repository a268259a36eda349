"""What a drill cannot do on a cluster is refused with the reason and with what can be done."""

from __future__ import annotations

import pytest

from holdfast_controller.cluster import Invalid
from holdfast_controller.drills import DrillKind
from holdfast_controller.kube.taking import refuse


@pytest.mark.parametrize("kind", [DrillKind.FREEZE, DrillKind.OOM])
def test_what_needs_the_right_to_run_something_in_a_pod(kind: DrillKind) -> None:
    with pytest.raises(Invalid, match=f"{kind.value}: only the local engine .* try kill, notice or evict"):
        refuse(kind, may_cordon=True)


def test_a_node_that_others_use_too() -> None:
    with pytest.raises(Invalid, match=r"node: it cordons .* \(jobs.drillNodes in the chart's values\): try"):
        refuse(DrillKind.NODE, may_cordon=False)
    refuse(DrillKind.NODE, may_cordon=True)


@pytest.mark.parametrize("kind", [DrillKind.EVICT, DrillKind.NOTICE, DrillKind.KILL])
def test_what_can_always_be_done(kind: DrillKind) -> None:
    refuse(kind, may_cordon=False)
