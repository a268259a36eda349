"""The gradients of a step, accumulated over micro-batches and averaged over ranks, are the batch's."""

from __future__ import annotations

import json
from pathlib import Path

from gangs import Workshop

SCRIPT = Path(__file__).parent / "gradients_script.py"
TOLERANCE = 1e-6
"""fp32, gradients of about 0.1: sums are made in another order."""


def test_gradients_are_exchanged_once_a_step_and_equal_those_of_the_whole_batch(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, script=SCRIPT, arguments=[])
    assert gang.wait() == [0, 0], gang.texts()
    for rank in gang.ranks:
        (told,) = (line for line in rank.text().splitlines() if line.startswith("{"))
        found = json.loads(told)
        # DDP has one bucket here, FSDP two parts that are exchanged by themselves; three passes a step.
        assert {name: of["exchanges"] for name, of in found.items()} == {"ddp": 1, "fsdp": 2}
        for name, of in found.items():
            assert of["gradients"] < TOLERANCE, (name, of)
            assert of["loss"] < TOLERANCE, (name, of)
