"""A rank that says nothing is spoken for by its supervisor, through the pod's termination message."""

from __future__ import annotations

import json

import pytest
from tests.kube.documents import NOON_SECONDS, ended, job, limited, pod, verdict

from holdfast_controller.jobs import Verdict
from holdfast_trainer.contract import Termination


def rank_end(rank: int, **how: object) -> str:
    """As a supervisor tells it."""
    return json.dumps({"rank": rank, **how, "ended": NOON_SECONDS + 599.2, "peak_bytes": 300 * 2**20})


RESET = Termination("failed", 800, 750, "RuntimeError: Connection reset by peer").to_json()


def test_a_rank_that_a_signal_ended_is_named_though_its_torchrun_exits_1() -> None:
    killed = pod(1, "Failed", ended(1, rank_end(1, signal=9)))
    peer = pod(0, "Failed", ended(1, RESET, at="2026-05-01T12:09:59Z"))
    assert verdict(job(), peer, killed) == (Verdict.FAILED, "replica 1: rank 1 ended by SIGKILL")


def test_memory_that_ran_out_is_told_with_the_peak_of_the_rank_that_took_it() -> None:
    killed = limited(pod(1, "Failed", ended(1, rank_end(5, signal=9), "OOMKilled")), "512Mi")
    assert verdict(job(), pod(0, "Failed", ended(1, RESET)), killed) == (
        Verdict.OUT_OF_MEMORY,
        "replica 1: OutOfMemory: the container reached its limit of 512Mi; rank 5 had 300 MiB at its peak",
    )


def test_a_configuration_error_of_a_program_that_has_no_words_is_known_by_its_code() -> None:
    assert verdict(job(), pod(phase="Failed", state=ended(1, rank_end(0, code=78))))[0] is (
        Verdict.CONFIG_ERROR
    )


def test_a_program_that_knows_of_no_notices_was_deleted_when_it_ended_by_one() -> None:
    gone = pod(phase="Failed", state=ended(1, rank_end(0, signal=15)), deleted=("2026-05-01T12:10:02Z", 0))
    assert verdict(job(), gone) == (Verdict.DISRUPTED, "replica 0: Deleted: somebody deleted the pod")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("ImportError: \x1b[31mno module\x1b[0m", "; it last said: ImportError: no module"),
        ("", ""),
        ("[rank0]: ", ""),
        ("...", "; it last said: ..."),
        ("\n", ""),
        (["a list"], ""),
        (None, ""),
    ],
)
def test_what_a_program_without_words_of_its_own_wrote_last_is_shown(said: object, shown: str) -> None:
    incident = verdict(job(), pod(phase="Failed", state=ended(1, rank_end(0, code=1, said=said))))
    assert incident == (Verdict.FAILED, f"replica 0: rank 0 ended with exit code 1{shown}")


@pytest.mark.parametrize(
    "message",
    [
        "[1]", '{"rank": 1}', '{"rank": "1", "signal": 9, "ended": 1}', '{"rank": 1, "ended": 1}',
        '{"rank": 1, "signal": 9, "ended": NaN}', '{"rank": 1, "signal": 9, "code": 1, "ended": 1}',
        '{"rank": 1, "signal": [9], "ended": 1}', "[" * 4000,
        f'{{"rank": 1, "signal": 9, "ended": {"1" * 400}}}',
        f'{{"rank": 1, "signal": 9, "ended": 1, "peak_bytes": {"1" * 400}}}',
    ],
)  # fmt: skip
def test_what_somebody_else_wrote_into_the_message_counts_for_nothing(message: str) -> None:
    """Whatever runs in a pod can write there."""
    incident = verdict(job(), pod(phase="Failed", state=ended(1, message)))
    assert incident == (Verdict.FAILED, "replica 0: ended with exit code 1")


def test_a_signal_without_a_name_has_its_number() -> None:
    incident = verdict(job(), pod(phase="Failed", state=ended(1, rank_end(0, signal=40))))
    assert incident == (Verdict.FAILED, "replica 0: rank 0 ended by signal 40")
