"""Ranks that save and load one checkpoint together: late ones, absent ones, and one that cannot write."""

from __future__ import annotations

import pytest
from saving import Told, flip, listing, make_saver, state
from thread_gang import ThreadRank, in_gang
from waiting import wait_until

from holdfast_trainer.checkpoint import CheckpointDirectory, CheckpointError, Fenced, load_newest
from holdfast_trainer.checkpoint.tensorfile import Written
from holdfast_trainer.contract import RunDir, raise_fence


def save_together(run: RunDir, world_size: int, step: int) -> None:
    def work(gang: ThreadRank) -> None:
        saver = make_saver(run, rank=gang.rank, world_size=world_size)
        saver.save(step, state(step), {"rng": 100 * step + gang.rank})
        saver.wait()

    in_gang(world_size, work)


def test_ranks_meet_in_one_checkpoint_and_each_gets_its_own_back(run: RunDir) -> None:
    save_together(run, 3, 10)
    assert sorted(path.name for path in run.checkpoint(10).iterdir()) == [
        "manifest.json",
        "rank-0.safetensors",
        "rank-1.safetensors",
        "rank-2.safetensors",
    ]
    loaded = in_gang(3, lambda gang: load_newest(run, 1, gang)[0])
    assert [one.own["rng"] for one in loaded] == [1000, 1001, 1002]


def test_with_another_world_size_nobody_has_a_part_of_its_own(run: RunDir) -> None:
    save_together(run, 2, 10)
    loaded = in_gang(3, lambda gang: load_newest(run, 1, gang)[0])
    assert [one.own for one in loaded] == [None, None, None]
    assert [one.shared["parts"]["w"][0] for one in loaded] == [10.0] * 3


def test_one_ranks_damage_makes_all_ranks_fall_back(run: RunDir) -> None:
    save_together(run, 2, 10)
    save_together(run, 2, 20)
    flip(run.checkpoint(20) / "rank-1.safetensors")
    for loaded, skipped in in_gang(2, lambda gang: load_newest(run, 1, gang)):
        assert loaded.manifest.step == 10
        assert skipped[0].step == 20
        assert skipped[0].reason.startswith("rank 0: rank-1.safetensors: checksum")


def test_a_rank_that_cannot_write_is_named_and_the_next_save_works(run: RunDir) -> None:
    told = Told()
    first = make_saver(run, told, world_size=2)
    first.save(10, state(10), {}, timeout=20)
    peer = CheckpointDirectory(run, 1)
    peer.report_failure(peer.begin(10, 1), 1, "No space left on device")
    message = "step 10 could not be saved: rank 1 could not write its part: No space left on device"
    with pytest.raises(CheckpointError, match=message):
        first.wait()
    assert (listing(run), told.failed) == ([], [f"10: {message}"])
    second = make_saver(run, rank=1, world_size=2)
    second._saves = 1  # it took part in the failed save
    for saver in (first, second):
        saver.save(10, state(10), {})
    for saver in (first, second):
        saver.wait()
    assert listing(run) == ["step-00000010"]


def test_what_a_rank_writes_late_into_a_failed_save_does_not_reach_the_next(run: RunDir) -> None:
    first = make_saver(run, world_size=2)
    first.save(10, state(10), {}, timeout=0.01)
    with pytest.raises(CheckpointError, match="rank 1 did not write its part in time"):
        first.wait()
    late = CheckpointDirectory(run, 1)
    partial = late.begin(10, 1)
    late.report_part(partial, 1, Written(4, "0" * 64))
    first.save(10, state(10), {}, timeout=0.01)
    with pytest.raises(CheckpointError, match="rank 1 did not write its part in time"):
        first.wait()
    assert first.durable_step == 0


def test_a_wait_for_peers_ends_when_a_newer_attempt_takes_over(run: RunDir) -> None:
    """It swept the save away; a rank that was late made the directory anew, for parts that never come."""
    first = make_saver(run, world_size=2)
    first.save(10, state(10), {})
    wait_until(lambda: list(run.checkpoints.rglob("rank-0.json")), "rank 0's part")
    raise_fence(run, 2)
    CheckpointDirectory(run, 2).sweep()
    CheckpointDirectory(run, 1).begin(10, 1)
    with pytest.raises(Fenced, match="attempt 1 was superseded by attempt 2"):
        first.wait()


def test_a_failing_rank_does_not_wait_long_for_peers_that_may_be_gone(run: RunDir) -> None:
    first = make_saver(run, world_size=2)
    first.save(10, state(10), {})
    first.hurry(0.05)
    with pytest.raises(CheckpointError, match="rank 1 did not write its part in time"):
        first.wait()
