"""No room, or no way to write: nothing durable is lost, it is told, and tried again until there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from asked import address_of, get
from disks import fill, real_disk, remount
from gangs import KILL, NOTICE, Gang, Workshop
from waiting import wait_until

from holdfast_trainer.contract import Progress, Termination

pytestmark = pytest.mark.long


def served(gang: Gang) -> Progress:
    """What rank 0 answers just now."""
    return Progress.from_json(get(address_of(gang), "/progress"))


@pytest.mark.slow
@pytest.mark.parametrize("then", ["room", "notice", "notice at exit", "notice, and then room"])
def test_the_last_save_waits_for_room_as_long_as_its_steps_took(
    workshop: Workshop, small_disk: Path, then: str
) -> None:
    options = {"steps": 22, "save_every": 10, "run_dir": small_disk / "run", "size": 1000}
    left_early = {"steps": 40, "break_at": 21} if then == "notice at exit" else {}
    grace = {} if then == "notice, and then room" else {"HOLDFAST_GRACE_SECONDS": "10"}
    gang = workshop.start(ranks=2, hold_at=11, pause=0.5, env=grace, **{**options, **left_early})
    wait_until(lambda: gang.history.run.checkpoint(10).exists(), "step 10 to be durable")
    fill(small_disk / "others")
    gang.release()
    gang.wait_for_text("not durable yet; tried again for ")
    if then == "room":
        (small_disk / "others").unlink()
    else:
        gang.signal(NOTICE)
        gang.wait_for_text("not durable yet; tried again while the notice leaves ")
    if then == "notice, and then room":
        (small_disk / "others").unlink()
    assert gang.wait() == [0, 0], gang.texts()
    assert "Traceback" not in gang.texts()
    message = gang.termination()
    if then.endswith("room"):
        outcome = "finished" if then == "room" else "interrupted"
        assert (message.outcome, message.durable_step, message.error) == (outcome, 22, "")
        return
    assert (message.outcome, message.step, message.durable_step) == ("interrupted", 22, 10)
    assert "step 22 could not be saved: No space left on device" in message.error
    (small_disk / "others").unlink()
    last = workshop.start(ranks=2, **options)
    assert last.wait() == [0, 0], last.texts()
    assert "resumed from step 10" in last.texts()


def test_where_there_is_no_room_for_the_last_save_the_next_attempt_makes_it(
    workshop: Workshop, small_disk: Path
) -> None:
    gang = workshop.start(ranks=2, steps=30, hold_at=25, save_every=10, run_dir=small_disk / "run", size=1000)
    wait_until(lambda: gang.history.run.checkpoint(20).exists(), "step 20 to be durable")
    gang.wait_for_text("step 25")
    fill(small_disk / "others")
    gang.release()
    assert gang.wait() == [1, 1], gang.texts()
    message = gang.termination()
    assert (message.outcome, message.durable_step, message.storage_unavailable) == ("failed", 20, True)
    assert message.error.startswith("trained to step 30, but it is not durable: step 30 could not be saved: ")
    (small_disk / "others").unlink()
    last = workshop.start(ranks=2, steps=30, save_every=10, run_dir=small_disk / "run", size=1000)
    assert last.wait() == [0, 0], last.texts()
    assert "resumed from step 20" in last.texts()


def test_where_there_is_no_room_to_begin_that_is_told_and_the_next_attempt_goes_on(
    workshop: Workshop, small_disk: Path
) -> None:
    """The disk may be full of somebody else's: the job has done nothing wrong, and loses nothing."""
    first = workshop.start(ranks=2, steps=20, save_every=10, run_dir=small_disk / "run", size=1000)
    assert first.wait() == [0, 0], first.texts()
    fill(small_disk / "others")
    full = workshop.start(ranks=2, steps=30, save_every=10, run_dir=small_disk / "run", size=1000)
    assert full.wait() == [1, 1], full.texts()
    message = full.termination()
    assert (message.outcome, message.storage_unavailable, message.config_error) == ("failed", True, False)
    assert message.error == (
        f"there is no room to begin in run directory {small_disk / 'run'}: [Errno 28] No space left on "
        "device. Free some, or enlarge the volume; what was saved is still there"
    )
    assert all(f"error: {message.error}" in rank.text() for rank in full.ranks)
    (small_disk / "others").unlink()
    last = workshop.start(ranks=2, steps=30, save_every=10, run_dir=small_disk / "run", size=1000)
    assert last.wait() == [0, 0], last.texts()
    assert "resumed from step 20" in last.texts()


def test_where_the_disk_has_become_read_only_that_is_told_and_the_next_attempt_goes_on(
    workshop: Workshop, tmp_path: Path
) -> None:
    """The kernel does that to one which fails. The attempt counted as a failure of the job."""
    with real_disk(tmp_path / "disk", 8 << 20) as disk:
        first = workshop.start(ranks=2, steps=20, save_every=10, run_dir=disk / "run")
        assert first.wait() == [0, 0], first.texts()
        remount(disk, "ro")
        closed = workshop.start(ranks=2, steps=30, save_every=10, run_dir=disk / "run")
        assert closed.wait() == [1, 1], closed.texts()
        message = closed.termination()
        assert (message.outcome, message.storage_unavailable, message.config_error) == ("failed", True, False)
        assert message.error.startswith(f"run directory {disk / 'run'} is read-only: [Errno 30] Read-only f")
        assert message.error.endswith("what was saved is still there")
        remount(disk, "rw")
        last = workshop.start(ranks=2, steps=30, save_every=10, run_dir=disk / "run")
        assert last.wait() == [0, 0], last.texts()
        assert "resumed from step 20" in last.texts()


def test_training_goes_on_while_the_disk_is_full(workshop: Workshop, small_disk: Path) -> None:
    """What was durable stays so, and the next save that finds room is a good one."""
    gang = workshop.start(
        ranks=2, steps=50_000, save_every=10, pause=0.02, run_dir=small_disk / "run", size=1000
    )
    run = gang.history.run
    wait_until(lambda: run.checkpoint(10).exists(), "step 10 to be durable")
    fill(small_disk / "filler")
    failed = "failed, training goes on: step"
    gang.wait_for_text(failed)
    assert "No space left on device" in gang.texts()
    durable = sorted(path.name for path in run.checkpoints.glob("step-*"))
    seen = gang.ranks[0].text().count("step ")
    wait_until(lambda: gang.ranks[0].text().count("step ") > seen + 20, "training to go on")
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == durable
    assert not any(rank.poll() for rank in gang.ranks)

    (small_disk / "filler").unlink()
    wait_until(
        lambda: max(path.name for path in run.checkpoints.glob("step-*")) > durable[-1], "a save to find room"
    )
    gang.signal(NOTICE)
    assert gang.wait() == [0, 0], gang.texts()
    message = gang.termination()
    assert (message.outcome, message.durable_step, message.error) == ("interrupted", message.step, "")
    again = workshop.start(ranks=2, steps=message.step + 1, run_dir=run.path, size=1000)
    assert again.wait() == [0, 0], again.texts()
    assert f"resumed from step {message.step}" in again.texts()


def test_a_save_whose_disk_hangs_is_told_and_holds_no_training_up(workshop: Workshop) -> None:
    """Whose next save was due waited for it for ever, and had its watchdog told that all was well; so did the
    end of the training."""
    gang = workshop.start(steps=10**6, save_every=5, disk_at=9, disk="pwrite", pause=0.02, hold_at=60)
    gang.wait_for_text("step 10 could not be saved: ")
    gang.wait_for_text("step 60")
    fault = served(gang).save_fault or ""
    place = gang.history.run.path
    assert fault.startswith(f"step 10 could not be saved: {place} has taken nothing of rank 0 for "), fault
    gang.signal(KILL)
    gang.wait()


def test_a_rank_whose_run_directory_hangs_holds_no_other_up(workshop: Workshop) -> None:
    """It asked there for the newest checkpoint, in the thread that trains with the watchdog at rest, before
    each save of several ranks; the others waited for it, with theirs at rest too."""
    gang = workshop.start(
        ranks=2, steps=10**6, save_every=5, disk_at=9, disk="hangs", disk_rank=1, pause=0.02, hold_at=60
    )
    gang.wait_for_text("step 10 could not be saved: ", rank=1)
    gang.wait_for_text("step 60", rank=1)
    gang.signal(KILL)
    gang.wait()


@pytest.mark.parametrize(
    ("in_what", "said"), [("pwrite", "could not be saved"), ("rmdir", "is saved, but old")]
)
def test_a_training_whose_disk_hangs_before_its_last_save_says_so_and_ends(
    workshop: Workshop, in_what: str, said: str
) -> None:
    gang = workshop.start(steps=20, save_every=5, keep=1, disk_at=9, disk=in_what, hold_at=9)
    wait_until(lambda: gang.history.events("checkpoint"), "step 5 to be durable")
    gang.release()
    assert gang.wait() == [1], gang.texts()
    message = gang.termination()
    durable = 5 if in_what == "pwrite" else 10
    assert (message.outcome, message.step, message.durable_step) == ("failed", 20, durable)
    assert message.storage_unavailable, "it goes on where its disk answers"
    assert message.error.startswith(f"trained to step 20, but it is not durable: step 10 {said}")


def test_the_others_hear_whose_disk_hangs_in_the_last_save(workshop: Workshop) -> None:
    """They waited for that rank until they took it for gone, which was told as the reason."""
    gang = workshop.start(ranks=2, steps=20, save_every=100, disk_at=9, disk="pwrite", disk_rank=1)
    assert gang.wait() == [1, 1], gang.texts()
    for rank in range(2):
        message = gang.termination(rank)
        assert message.storage_unavailable
        assert "step 20 could not be saved: " in message.error
        assert "has taken nothing of rank 1 for " in message.error


def test_a_training_whose_last_save_is_durable_has_finished_though_old_ones_cannot_go(
    workshop: Workshop,
) -> None:
    gang = workshop.start(steps=10, save_every=5, keep=1, disk_at=9, disk="rmdir", hold_at=9)
    wait_until(lambda: gang.history.events("checkpoint"), "step 5 to be durable")
    gang.release()
    assert gang.wait() == [0], gang.texts()
    assert (gang.termination().outcome, gang.termination().durable_step) == ("finished", 10)


@pytest.mark.slow
def test_a_save_that_found_no_room_is_tried_again_long_before_the_next_is_due(
    workshop: Workshop, small_disk: Path
) -> None:
    every = 60
    gang = workshop.start(
        ranks=2, steps=1000, save_every=every, pause=0.2, run_dir=small_disk / "run", size=1000
    )
    gang.wait_for_step(1)
    fill(small_disk / "others")
    gang.wait_for_text(f"checkpoint of step {every} failed, training goes on")
    fault = wait_until(lambda: served(gang).save_fault, "it to be served")
    assert fault.startswith(f"step {every} could not be saved: "), fault
    assert "No space left on device" in fault
    (small_disk / "others").unlink()
    wait_until(lambda: gang.history.events("checkpoint"), "a save to find room")
    wait_until(lambda: served(gang).save_fault is None, "that to be served")
    saved = gang.history.events("checkpoint")[0]
    assert every < saved["step"] < 2 * every
    gang.signal(KILL)
    gang.wait()
    again = workshop.start(ranks=2, steps=saved["step"] + 1, run_dir=small_disk / "run", size=1000)
    assert again.wait() == [0, 0], again.texts()
    assert f"resumed from step {saved['step']}" in again.texts()


@pytest.mark.slow
def test_a_rank_that_can_not_even_say_that_its_save_failed_holds_up_nobody(workshop: Workshop) -> None:
    """As on a node whose mount is gone: rank 0 would wait for its part for ten minutes, at every save."""
    gang = workshop.start(ranks=2, steps=1000, save_every=100, pause=0.1, hold_at=99)
    gang.wait_for_step(1)
    blocked = gang.history.run.checkpoints / ".step-00000100.attempt-1.save-1" / "rank-1.safetensors"
    blocked.mkdir(parents=True)
    gang.release()
    gang.wait_for_text("checkpoint of step 100 failed, training goes on", rank=1)
    wait_until(lambda: gang.history.events("checkpoint"), "a save to succeed")
    told = [line["error"] for line in gang.history.events("checkpoint_failed")]
    assert told == [
        "step 100 could not be saved: a rank could neither write its part nor say so; its log tells why"
    ]
    assert 100 < gang.history.events("checkpoint")[0]["step"] < 200
    gang.signal(NOTICE)
    assert gang.wait() == [0, 0], gang.texts()


VALIDATES_LAST = """
import errno, os, sys, threading
import torch
from holdfast_trainer import saves
from holdfast_trainer.checkpoint import directory
from holdfast_trainer.run import Run

run = Run(checkpoint_every=2, keep_best=1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(4):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()

def look(run):
    if sys.argv[1] == "hangs":
        threading.Event().wait()
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

directory.checkpoint_steps, saves.STUCK_SECONDS = look, 0.5
run.log(val_loss=1.0)
"""


@pytest.mark.parametrize(
    ("disk", "told"), [("fails", "Stale file handle"), ("hangs", "no answer within 0.5 s")]
)
def test_a_disk_that_is_lost_after_the_last_save_does_not_keep_a_run_from_ending(
    workshop: Workshop, tmp_path: Path, disk: str, told: str
) -> None:
    """What was trained was durable, and the validation after it ended the run as failed, or never."""
    script = tmp_path / "validates_last.py"
    script.write_text(VALIDATES_LAST)
    gang = workshop.start(script=script, arguments=[disk])
    assert gang.wait() == [0], gang.texts()
    assert gang.termination() == Termination("finished", 4, 4)
    assert f"not weighed by the validation of step 4: {told}" in gang.texts().replace("[Errno 116] ", "")
