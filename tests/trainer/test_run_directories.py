"""A run directory is what all ranks share and what the attempts before have had; where it is another one,
that is told, and nothing of the run is begun anew in it."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from gangs import Workshop

from holdfast_trainer.contract import EXIT_CONFIG_ERROR

APART = """\
import os

os.environ["HOLDFAST_RUN_DIR"] += os.environ["RANK"]
import torch

from holdfast_trainer import place
from holdfast_trainer.run import Run

place.SEEN_SECONDS = 1.0
run = Run()
model = run.wrap(torch.nn.Linear(2, 2))
run.track(model=model)
for step in run.steps(1000):
    pass
"""


def test_ranks_that_see_other_directories_say_so(workshop: Workshop, tmp_path: Path) -> None:
    """As on two machines without shared storage: each waited at the first save for what the other wrote."""
    script = tmp_path / "apart.py"
    script.write_text(APART)
    gang = workshop.start(ranks=2, script=script, arguments=[])
    assert gang.wait() == [1, 1], gang.texts()
    message = gang.termination()
    assert (message.outcome, message.storage_unavailable) == ("failed", False)
    host, run = socket.gethostname(), gang.history.run.path
    assert message.error == (
        f"rank 1 on {host} does not see in run directory {run}1 what rank 0 on {host} has just made in its "
        "own: all ranks need the same one. See that its volume is mounted on every machine, name a directory "
        "on storage that they share (NFS, Lustre), or an object store (s3://BUCKET/PREFIX)"
    )

    gang = workshop.start(ranks=2, script=script, arguments=[], env={"HOLDFAST_DURABLE_STEP": "10"})
    assert gang.wait() == [1, 1], gang.texts()
    assert gang.termination().storage_unavailable, "it was shared before"


def test_saved_work_is_not_begun_anew_in_another_directory(workshop: Workshop, tmp_path: Path) -> None:
    """A volume that is not mounted leaves an empty directory: the job began from nothing there."""
    workshop.finish(ranks=2, steps=10)
    saved = {"HOLDFAST_DURABLE_STEP": "10"}
    empty = tmp_path / "empty"
    empty.mkdir()
    elsewhere = workshop.start(ranks=2, steps=20, run_dir=empty, env=saved)
    assert elsewhere.wait() == [1, 1], elsewhere.texts()
    message = elsewhere.termination()
    assert (message.outcome, message.step, message.storage_unavailable) == ("failed", 0, True)
    assert message.error == (
        f"run directory {empty} has nothing of the attempts before, which saved step 10 in theirs: is its "
        "volume mounted, was storage.claim changed, or the directory removed? Nothing is begun anew over "
        "saved work; where that is meant, delete the job and submit it again"
    )
    assert list(empty.iterdir()) == []

    back = workshop.start(ranks=2, steps=20, env=saved)
    assert back.wait() == [0, 0], back.texts()
    assert "resumed from step 10" in back.texts()


def test_a_directory_that_takes_nothing_any_more_is_no_fault_of_the_job(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Whatever the system says: the same was good for the attempts before."""
    (tmp_path / "file").touch()
    for env, passes in (({}, False), ({"HOLDFAST_DURABLE_STEP": "10"}, True)):
        gang = workshop.start(steps=20, run_dir=tmp_path / "file", env=env)
        assert gang.wait() == [1], gang.texts()
        assert gang.termination().storage_unavailable is passes, gang.texts()


def test_data_that_the_attempts_before_had_is_waited_for(workshop: Workshop, tmp_path: Path) -> None:
    """A job that had trained for days was over at once, for ever, where its data was not mounted."""
    script = tmp_path / "script.py"
    script.write_text(
        "from holdfast_trainer.run import Run\n"
        "from holdfast_trainer.token_index import read_index\n"
        "from pathlib import Path\n"
        f"run = Run()\nread_index(Path({str(tmp_path / 'data')!r}))\n"
    )
    for env, status, passes in (({}, EXIT_CONFIG_ERROR, False), ({"HOLDFAST_DURABLE_STEP": "0"}, 1, True)):
        for there in (False, True):  # also where it is mounted: an empty directory
            if there:
                (tmp_path / "data").mkdir()
            gang = workshop.start(script=script, arguments=[], env=env)
            assert gang.wait() == [status], gang.texts()
            message = gang.termination()
            assert (message.storage_unavailable, message.config_error) == (passes, not passes), message
            had = ". Attempts before have trained: is its volume mounted?"
            assert message.error.endswith(had) is passes, message
        (tmp_path / "data").rmdir()


def test_a_new_run_goes_on_from_the_checkpoints_of_another(workshop: Workshop) -> None:
    """Of a job that was deleted, or whose cluster is gone (docs/interruptions.md)."""
    whole, first = workshop.finish("whole", steps=20), workshop.finish("first", steps=10)
    shutil.copytree(first.run.checkpoints, workshop.path / "second" / "checkpoints")
    second = workshop.finish("second", steps=20)
    assert second.events("attempt_start")[0]["resumed_step"] == 10
    assert second.stop()["digest"] == whole.stop()["digest"]
    assert second.losses().items() <= whole.losses().items()
