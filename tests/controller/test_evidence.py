"""Who ended a replica: the platform, the kernel, we, or nobody but itself."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from holdfast_controller.cluster import RankExit, ReplicaState
from holdfast_controller.drills import DrillKind
from holdfast_controller.local.evidence import AttemptFacts, ReplicaFacts, judge
from holdfast_controller.local.record import Drill, Exit, Lost, Stop
from holdfast_trainer.contract import Termination

SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12814 got signal: 15"
KILL, TERM = int(signal.SIGKILL), int(signal.SIGTERM)


def facts(index: int = 0, running: bool = False, **more: object) -> ReplicaFacts:
    return ReplicaFacts(index, running, **more)  # type: ignore[arg-type]


def ranks(*exits: RankExit) -> dict[str, object]:
    return {"ranks": exits, "ranks_started": len(exits)}


PEER_GONE = "RuntimeError: [gloo/pair.cc:561] Connection closed by peer [127.0.0.1]:6831"
CASES = [
    pytest.param((facts(running=True),), {}, False, "", id="runs"),
    pytest.param((facts(exit=Exit(9, 0), **ranks(RankExit(0, 0, None, 8))),), {}, False, "", id="finished"),
    pytest.param((facts(lost=Lost(9, False)),), {}, True, "Vanished", id="supervisor killed from outside"),
    pytest.param((facts(exit=Exit(9, None, KILL)),), {}, True, "Killed: torchrun got SIGKILL", id="agent"),
    pytest.param(
        (facts(exit=Exit(9, 1), **ranks(RankExit(0, None, KILL, 8))),),
        {},
        True,
        "Killed: rank 0 got SIGKILL from outside",
        id="kill -9 of a rank",
    ),
    pytest.param(
        (facts(exit=Exit(9, 1), **ranks(RankExit(0, None, KILL, 8)), lost=Lost(8, True)),),
        {},
        False,
        "OutOfMemory",
        id="the kernel's memory killer",
    ),
    pytest.param(
        (facts(exit=Exit(9, 1), **ranks(RankExit(1, None, TERM, 8.2), RankExit(0, 3, None, 8))),),
        {},
        False,
        "",
        id="torchrun ends the peer of a failed rank",
    ),
    pytest.param(
        (facts(exit=Exit(39, 1), **ranks(RankExit(0, 3, None, 8), RankExit(1, None, KILL, 38))),),
        {},
        False,
        "",
        id="torchrun kills the peer of a failed rank, which did not end by SIGTERM",
    ),
    *(
        pytest.param(
            (
                facts(
                    exit=Exit(29, 1),
                    termination=Termination("failed", 7, 0, error),
                    **ranks(RankExit(0, None, KILL, seen), RankExit(1, 1, None, 8)),
                ),
            ),
            {},
            taken,
            "Killed: rank 0 got SIGKILL from outside" if taken else "",
            id=f"kill -9 of a rank, {told}",
        )
        for error, seen, taken, told in (
            (PEER_GONE, 8.9, True, "whose peer crashed before its supervisor saw it"),
            (PEER_GONE, 28.0, False, "by torchrun, as its peer had lost the connection to it"),
            ("ValueError: a bad batch", 8.9, False, "whose peer had failed by itself"),
        )
    ),
    pytest.param(
        (facts(exit=Exit(9, 1), **ranks(RankExit(0, None, TERM, 8))),),
        {},
        True,
        "Killed: rank 0 got SIGTERM from outside",
        id="kill of a rank",
    ),
    pytest.param(
        (facts(exit=Exit(9, 1), **ranks(RankExit(0, None, KILL, 8.8))),),
        {"killed": 8.5},
        False,
        "Killed: by Holdfast",
        id="a rank that we killed",
    ),
    pytest.param(
        (facts(exit=Exit(9, 1), **ranks(RankExit(0, None, KILL, 8)), lost=Lost(8, True, 512 << 20)),),
        {},
        False,
        "OutOfMemory: it reached its limit of 512 MiB",
        id="beyond its own limit",
    ),
    pytest.param(
        (facts(exit=Exit(9, 1), ranks=(RankExit(0, 1, None, 8, said=PEER_GONE),), ranks_started=2),),
        {},
        True,
        "Vanished: 1 of its ranks ended without a trace",
        id="a rank of a plain script vanished, and the other one lost it",
    ),
    pytest.param(
        (facts(exit=Exit(9, 1), ranks=(RankExit(0, 1, None, 8, said="KeyError: 'a'"),), ranks_started=2),),
        {},
        False,
        "",
        id="a rank of a plain script failed",
    ),
    pytest.param(
        (facts(exit=Exit(9, 1), ranks=(RankExit(0, 0, None, 8),), ranks_started=2),),
        {},
        True,
        "Vanished: 1 of its ranks ended without a trace",
        id="a rank's supervisor killed",
    ),
    pytest.param(
        (facts(exit=Exit(9, 1), **ranks(RankExit(0, 0, None, 8))),),
        {},
        True,
        "Terminated",
        id="agent told to end",
    ),
    pytest.param((facts(exit=Exit(9, 1)),), {}, False, "", id="torchrun failed before any rank"),
    pytest.param(
        (facts(exit=Exit(9, 1), torchrun_said=SIGNALLED),),
        {},
        True,
        "Terminated: torchrun was told to end before",
        id="agent told to end before any rank",
    ),
    pytest.param(
        (facts(exit=Exit(9, 1), torchrun_said=SIGNALLED),),
        {"stop": Stop(8, 38)},
        False,
        "",
        id="stopped before any rank",
    ),
    pytest.param(
        (facts(lost=Lost(9, False)),), {"killed": 8.5}, False, "Killed: by Holdfast", id="we did it"
    ),
    pytest.param(
        (facts(lost=Lost(8, False)),), {"killed": 8.5}, True, "Vanished", id="lost before we did it"
    ),
    pytest.param(
        (facts(lost=Lost(8, False, ours=True)),),
        {"killed": 8.5},
        False,
        "Killed: by Holdfast",
        id="we did it, and the clock was set back",
    ),
    pytest.param(
        (facts(exit=Exit(9, None, TERM)),), {"stop": Stop(8, 38)}, False, "", id="stopped before it was up"
    ),
    pytest.param(
        (facts(lost=Lost(8, False)),),
        {"killed": 8.5, "cut_short": "no room"},
        True,
        "CutShort: no room",
        id="cut short",
    ),
    pytest.param(
        (facts(exit=Exit(9.1, 1), **ranks(RankExit(0, None, KILL, 9)), lost=Lost(8, False)),),
        {"killed": 8.5, "cut_short": "no room"},
        True,
        "CutShort: no room",
        id="cut short, and it ran for a moment",
    ),
    pytest.param(
        (facts(exit=Exit(9, 0), **ranks(RankExit(0, 0, None, 8.9)), lost=Lost(8, False)),),
        {"killed": 8.5, "cut_short": "no room"},
        False,
        "",
        id="cut short, and done before that was known",
    ),
    pytest.param(
        (facts(lost=Lost(9, False), drill=Drill(DrillKind.KILL, 8, 8)),),
        {},
        True,
        "Drilled: killed",
        id="drill",
    ),
    pytest.param(
        (facts(running=True, drill=Drill(DrillKind.NOTICE, 8, 38)),), {}, True, "Drilled: given", id="notice"
    ),
]


@pytest.mark.parametrize(("replicas", "attempt", "disrupted", "reason"), CASES)
def test_who_took_a_replica(
    replicas: tuple[ReplicaFacts, ...], attempt: dict[str, object], disrupted: bool, reason: str
) -> None:
    seen = judge(AttemptFacts(replicas, **attempt))[0]  # type: ignore[arg-type]
    assert (seen.disrupted, seen.reason[: len(reason)] if reason else "") == (disrupted, reason)


def test_a_replica_that_falls_after_another_is_its_victim() -> None:
    failed = facts(0, exit=Exit(9, 1), **ranks(RankExit(0, 3, None, 8)))
    victim = facts(1, exit=Exit(9.5, None, TERM), **ranks(RankExit(1, None, TERM, 9.2)))
    first, second = judge(AttemptFacts((failed, victim)))
    assert not first.disrupted
    assert not second.disrupted
    assert second.reason == "Ended after rank 0"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        pytest.param(facts(0, exit=Exit(9, 1), **ranks(RankExit(0, 3, None, 8))), "", id="a rank failed"),
        pytest.param(facts(0, exit=Exit(8, 1)), "", id="torchrun failed before it had a rank"),
        pytest.param(facts(0, exit=Exit(8, 0), **ranks(RankExit(0, 0, None, 8))), "Killed", id="it was done"),
        pytest.param(
            facts(0, exit=Exit(11, 1), **ranks(RankExit(0, 1, None, 10))), "Killed", id="it fails later"
        ),
        pytest.param(facts(0, running=True), "Killed", id="it runs"),
    ],
)
def test_a_rank_that_was_told_to_end_was_taken_where_no_other_failed_before(
    other: ReplicaFacts, reason: str
) -> None:
    told = facts(1, exit=Exit(9.5, 1), **ranks(RankExit(1, None, TERM, 9.2)))
    seen = judge(AttemptFacts((other, told)))[1]
    assert (seen.disrupted, seen.reason[:6]) == (bool(reason), reason)


def test_an_agent_killed_from_outside_ends_after_its_victims() -> None:
    """torchrun takes a while to end; its own rank and the peer are gone before that is on record."""
    taken = facts(0, exit=Exit(9, None, KILL), **ranks(RankExit(0, None, KILL, 8.8)))
    victim = facts(1, exit=Exit(9.4, 1), **ranks(RankExit(1, 1, None, 8.9)))
    first, second = judge(AttemptFacts((taken, victim)))
    assert (first.disrupted, first.reason) == (True, "Killed: torchrun got SIGKILL from outside")
    assert not second.disrupted


def test_a_rank_killed_from_outside_ends_after_its_peer_crashed() -> None:
    taken = facts(0, exit=Exit(9, 1), **ranks(RankExit(0, None, KILL, 8.8)))
    victim = facts(1, exit=Exit(9.4, 1), **ranks(RankExit(1, 1, None, 8.5)))
    first, second = judge(AttemptFacts((taken, victim)))
    assert (first.disrupted, second.disrupted) == (True, False)


def test_a_ranks_supervisor_killed_from_outside_is_told_after_its_peer_crashed() -> None:
    taken = facts(1, exit=Exit(9, 1), ranks=(), ranks_started=1)
    victim = facts(0, exit=Exit(9.1, 1), **ranks(RankExit(0, 1, None, 8.5)))
    first, second = judge(AttemptFacts((victim, taken)))
    assert (first.disrupted, second.disrupted) == (False, True)
    assert second.reason == "Vanished: 1 of its ranks ended without a trace, killed from outside"


def test_a_ranks_supervisor_killed_beside_a_rank_of_the_same_torchrun() -> None:
    reset = Termination("failed", 50, 40, "RuntimeError: Connection reset by peer")
    fault = Termination("failed", 50, 40, "ValueError: nan in the loss")
    seen = [
        judge(AttemptFacts((facts(0, exit=Exit(9, 1), ranks=bad, ranks_started=2, termination=word),)))[0]
        for bad, word in (((RankExit(0, 1, None, 8.5),), reset), ((RankExit(0, 1, None, 8.5),), fault))
    ]
    assert [replica.disrupted for replica in seen] == [True, False]


def test_states_and_times() -> None:
    seen = judge(AttemptFacts((facts(0, running=True), facts(1, exit=Exit(9, 0)), facts(2, exit=Exit(7, 1)))))
    assert [r.state for r in seen] == [ReplicaState.RUNNING, ReplicaState.SUCCEEDED, ReplicaState.FAILED]
    assert [r.ended_at for r in seen] == [None, 9, 7]
    left = (facts(0, lost=Lost(8, False)), facts(1, drill=Drill(DrillKind.KILL, 7, 7)), facts(2))
    assert [r.ended_at for r in judge(AttemptFacts(left, killed=6.0))] == [8, 7, 6], "as well as it is known"


def test_what_a_replica_left_is_told_as_it_is() -> None:
    message, crash = Termination("failed", 50, 40, "ValueError: nan"), RankExit(0, 1, None, 8)
    drilled = Drill(DrillKind.KILL, 7, 7)
    first, second, third = judge(
        AttemptFacts(
            (
                facts(0, exit=Exit(9, 1), termination=message, **ranks(crash)),
                facts(1, exit=Exit(9, None, KILL), lost=Lost(8, True), torchrun_said="hello"),
                facts(2, lost=Lost(8, True), drill=drilled),
            )
        )
    )
    assert (first.exit_code, first.exit_signal, first.termination, first.ranks) == (
        1,
        None,
        message,
        (crash,),
    )
    assert (second.exit_code, second.exit_signal, second.torchrun_said) == (None, KILL, "hello")
    memory = [one.out_of_memory for one in (first, second, third)]
    assert memory == [False, True, False], "of what we killed for a drill the kernel's word says nothing"


NO_WORD = Lost(9, False, unwritten="cannot write into /run/attempts/0001: No space left on device")


def test_what_could_not_begin_on_a_full_disk_has_the_disk_to_blame() -> None:
    (seen,) = judge(AttemptFacts((facts(lost=NO_WORD),)))
    assert not seen.disrupted
    assert seen.termination is not None
    assert seen.termination.storage_unavailable
    assert seen.termination.error == NO_WORD.unwritten


@pytest.mark.parametrize(
    ("more", "attempt"),
    [
        ({"ranks_started": 1}, {}),
        ({"drill": Drill(DrillKind.KILL, 8, 8)}, {}),
        ({}, {"rebooted": True}),
        ({}, {"cut_short": "no process left"}),
    ],
    ids=["a rank began", "a drill", "a reboot", "cut short"],
)
def test_a_full_disk_is_not_to_blame_for_what_else_took_a_replica(
    more: dict[str, object], attempt: dict[str, Any]
) -> None:
    (seen,) = judge(AttemptFacts((facts(lost=NO_WORD, **more),), **attempt))
    assert seen.disrupted
    assert seen.termination is None


def test_where_the_disk_took_no_word_of_an_end_nobody_is_said_to_have_caused_it() -> None:
    """A notice ended the supervisor, which its disk, read-only by then, could not be told."""
    (seen,) = judge(AttemptFacts((facts(lost=NO_WORD, ranks_started=1),)))
    assert seen.reason == f"Vanished: how its supervisor ended is not known: {NO_WORD.unwritten}"
