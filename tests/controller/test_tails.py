"""The last lines in a job's status: those of the newest attempts, and never more than an apiserver takes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from fakes import MemoryEngine
from scene import Scene, make, play

from holdfast_controller.jobs import ATTEMPTS_KEPT, TAIL_RANKS, AttemptRecord, Status, TrainingJob, Verdict
from holdfast_controller.lines import attempt_of, head_of
from holdfast_controller.policy.tails import (
    C_STACK_LINES,
    TAIL_BYTES,
    bound_tails,
    last_of_each,
    last_told,
    most_telling,
    rank_of,
)
from holdfast_controller.reconciler import TAIL_CHARACTERS


def attempts(count: int, text: str, ranks: int = TAIL_RANKS) -> list[AttemptRecord]:
    return [
        AttemptRecord(
            number=number,
            verdict=Verdict.DISRUPTED,
            log_tail={str(rank): text for rank in range(ranks)},
        )
        for number in range(1, count + 1)
    ]


def test_what_fits_stays() -> None:
    known = attempts(3, "the last line")
    bound_tails(known)
    assert known == attempts(3, "the last line")


def test_the_oldest_go_first_and_of_one_attempt_the_last_ranks() -> None:
    known = attempts(3, "12345678", ranks=2)  # ten bytes each, with their quotes
    bound_tails(known, limit=35)
    assert [sorted(record.log_tail) for record in known] == [[], ["0"], ["0", "1"]]


def test_a_rank_or_an_attempt_that_no_number_says_is_a_line_like_any_other() -> None:
    """Anybody's program can print what looks like our marks: such a one ended every controller."""
    many = "9" * 5000
    assert rank_of(f"[rank {many}] x", 2) == 2
    assert rank_of("[rank 639999] x", 2) == 639_999
    assert last_of_each([f"[rank {many}] x", "[rank 3] y"], 2, 1, 10) == ["9999999] x", "[rank 3] y"]
    assert attempt_of(f"==> attempt {many} <==") is None
    assert attempt_of(head_of(17)) == 17


@pytest.mark.parametrize("letter", ["x", "ж", "漢", "\x1b", '"'])
def test_a_status_stays_small_whatever_ranks_print(letter: str) -> None:
    known = attempts(ATTEMPTS_KEPT, letter * TAIL_CHARACTERS)
    bound_tails(known)
    assert known[-1].log_tail, "the newest attempt has some"
    written = Status(attempts=known).model_dump_json(by_alias=True).encode()
    assert len(written) < TAIL_BYTES + 64 * 1024


class Talkative(MemoryEngine):
    async def logs(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        yield "x" * TAIL_CHARACTERS


def test_a_job_that_is_disrupted_for_ever_has_a_status_that_stays_small() -> None:
    async def story(scene: Scene) -> None:
        scene.run_on(Talkative(TAIL_RANKS, clock=scene.seconds))
        job = await scene.submit(make(replicas=TAIL_RANKS))
        for number in range(1, ATTEMPTS_KEPT + 3):
            for replica in range(TAIL_RANKS):
                scene.engine.vanish(job, number, replica)
            await scene.look()
            scene.now += timedelta(minutes=6)
            job = await scene.look()
        assert [record.number for record in job.status.attempts] == list(range(4, ATTEMPTS_KEPT + 4))
        assert len(job.status.model_dump_json(by_alias=True).encode()) < TAIL_BYTES + 64 * 1024

    play(story)


def test_one_line_that_is_too_long_is_left_out() -> None:
    known = attempts(1, "x" * 100, ranks=1)
    bound_tails(known, limit=50)
    assert known[0].log_tail == {}


def test_a_c_stack_does_not_push_out_where_python_stood() -> None:
    """As Python 3.14 writes it of a rank that is ended as it hangs."""
    stack = ['  File "train.py", line 3 in forward', '  File "train.py", line 9 in <module>']
    calls = [f'  Binary file "/usr/lib/libtorch_cpu.so", at +0x{n:x} [0x7fb7d2b0{n:x}]' for n in range(32)]
    lines = [
        "step 7",
        "Fatal Python error: Aborted",
        "Current thread 0x00007fb7d2ac2200 [python] (most recent call first):",
        *stack,
        "",
        "Current thread's C stack trace (most recent call first):",
        *calls,
        "  <truncated rest of calls>",
    ]
    marked = [f"[rank 1] {line}" for line in lines]
    assert last_told(lines, 4) == [lines[2], *stack, ""]
    assert last_told(marked, 4) == [f"[rank 1] {line}" for line in (lines[2], *stack, "")]
    assert len(lines) - lines.index("") <= C_STACK_LINES
    said = ['  Binary file "weights.bin" is not there', "Current thread's name: main"]
    assert last_told(said, 20) == said


LOST = "RuntimeError: [pair.cc:561] Connection closed by peer"
BOOM = "[rank3]: ValueError: label 7 of 2 classes"


@pytest.mark.parametrize(
    ("reason", "tails", "rank"),
    [
        ("replica 1: rank 3 ended with exit code 1; it last said: boom", {"0": LOST, "3": BOOM}, "3"),
        ("replica 1: ValueError: label 7 of 2 classes", {"0": LOST, "2": LOST, "3": BOOM}, "3"),
        ("replica 1: ValueError: label 7 of 2 classes ... it goes on", {"2": LOST, "3": BOOM}, "3"),
        ("replica 1: ValueError: what nobody wrote", {"0": LOST, "2": LOST, "3": LOST}, "2"),
        ("no step for 30 s: rank 2 says nothing", {"0": "step", "2": "step"}, "2"),
        ("replica 1: rank 3 ended by SIGKILL", {"0": LOST, "2": LOST}, "2"),
        ("replica 1: DeletionByPodGC: node no longer exists", {"0": LOST, "10": LOST}, "0"),
        ("it ended without a trace", {"10": LOST, "9": LOST}, "9"),
        ("replica 0: ValueError", {}, None),
    ],
)
def test_whose_last_lines_are_shown_first(reason: str, tails: dict[str, str], rank: str | None) -> None:
    """Rank 0's were, which told of the connection that it had lost to the one to blame."""
    record = AttemptRecord(number=1, verdict=Verdict.FAILED, reason=reason, log_tail=tails)
    assert most_telling(record, ranks_a_replica=2) == rank
