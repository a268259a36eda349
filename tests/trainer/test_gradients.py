"""The gradients of a step, accumulated over micro-batches and averaged over ranks, are the batch's."""

from __future__ import annotations

import json
from pathlib import Path

from gangs import Workshop

SCRIPT = Path(__file__).parent / "gradients_script.py"
TOLERANCE = 1e-6
"""fp32, gradients of about 0.1: sums are made in another order."""


def test_gradients_equal_those_of_the_whole_batch_however_often_exchanged(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, script=SCRIPT, arguments=[])
    assert gang.wait() == [0, 0], gang.texts()
    for rank in gang.ranks:
        (told,) = (line for line in rank.text().splitlines() if line.startswith("{"))
        found = json.loads(told)
        # Three passes a step. DDP has one bucket here, and waits for the last; FSDP has two parts that are
        # exchanged by themselves, with each pass, so that no rank keeps whole gradients.
        assert {name: of["exchanges"] for name, of in found.items()} == {"ddp": 1, "fsdp": 6}
        assert found["ddp"]["pieces"] == 1, "what is exchanged is where they lie, and no copy of them"
        for name, of in found.items():
            assert of["gradients"] < TOLERANCE, (name, of)
            assert of["loss"] < TOLERANCE, (name, of)


def test_a_model_that_leaves_parameters_out_trains_where_wrap_is_told_so(
    workshop: Workshop, tmp_path: Path
) -> None:
    """As its data has it: DDP's error names an option that `run.wrap` has to take."""
    source = (Path(__file__).parent / "loop_script.py").read_text()
    for old, new in {
        "raw = nn.Sequential(*layers)\n": "raw = nn.Sequential(*layers)\nraw[0].spare = nn.Linear(2, 2)\n",
        "model = run.wrap(raw, ": "model = run.wrap(raw, find_unused_parameters=True, ",
    }.items():
        assert old in source
        source = source.replace(old, new)
    loop = tmp_path / "loop_with_spares.py"
    loop.write_text(source)
    assert workshop.finish(ranks=2, script=loop, steps=6).stop()["step"] == 6
