"""A notice comes while a save is stuck in a disk that has all but stopped: the newest step is saved.

Where saves are due by the clock the training has gone on meanwhile; where they are due by step, it stands
before the next one and waits for its turn, and the notice ends that wait.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from gangs import NOTICE, Workshop
from waiting import wait_until

GRACE = 8.0


@pytest.mark.slow
@pytest.mark.parametrize("every", ["1s", 3])
def test_a_stuck_save_makes_way_for_the_step_of_the_stop(
    workshop: Workshop, tmp_path: Path, every: str | int
) -> None:
    held = tmp_path / "held"
    options = {"steps": 10**6, "save_every": every, "pause": 0.1, "size": 20_000}
    gang = workshop.start(
        ranks=2,
        script=Path(__file__).with_name("held_disk_loop.py"),
        arguments=[json.dumps(options)],
        env={"HELD": str(held), "HOLDFAST_GRACE_SECONDS": str(GRACE)},
    )
    wait_until(lambda: gang.history.events("checkpoint"), "a first save, which tells how long one takes")
    held.touch()
    since: dict[str, float] = {}

    def stuck() -> str | None:
        """The save that has been under way for longer than the notice will last."""
        for path in gang.history.run.checkpoints.glob(".step-*"):
            if time.monotonic() - since.setdefault(path.name, time.monotonic()) > GRACE:
                return path.name
        return None

    name = wait_until(stuck, f"a save to be stuck: {gang.texts()[-2000:]}")
    if every == 3:
        waiting = int(name[6:14]) + every
        wait_until(lambda: gang.history.last_step() >= waiting, "the next save to be due")
    gang.signal(NOTICE, [1])
    gang.wait_for_text("giving up the save of step")
    held.unlink()

    assert gang.wait(300) == [0, 0], gang.texts()[-3000:]
    stop = gang.history.stop()
    assert (stop["outcome"], stop["durable_step"]) == ("interrupted", stop["step"])
    assert every == "1s" or stop["step"] == waiting, "it stood where the next save was due"
    (failed,) = gang.history.events("checkpoint_failed")
    assert failed["step"] == int(name[6:14]) < stop["step"]
    assert "given up for a newer step" in failed["error"]
    assert not (gang.history.run.checkpoints / name).exists()
