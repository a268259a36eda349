"""From what an attempt left behind to what happened to each replica. Pure.

The question is always whether somebody outside took the replica (a disruption) or it failed by itself.
A signal alone does not tell: torchrun ends the peers of a failed rank by SIGTERM, and a machine short of
memory sends the same SIGKILL as a lost one. So a signal counts as a disruption only when nobody of ours
sent it (no stop, no kill on record), the kernel's memory killer did not, and nothing that leads to such a
signal had ended badly before: the first bad end is the cause, later ones are its victims. The order of ends
does not tell for SIGKILL of another replica: a large process takes longer to end than its peer to crash.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from holdfast_controller.cluster import RankExit, ReplicaObservation, ReplicaState
from holdfast_controller.policy.classify import KILLERS, bad, lost_its_peer
from holdfast_trainer.contract import Termination

from .record import Drill, Exit, Lost, Stop

LATE_SECONDS = 1.0
"""By so much a supervisor on a busy machine may see an end after it was: its rank's peer has crashed by then.
torchrun kills the peers of a rank that failed no sooner: it asks them to end first, and waits."""
_TOLD_TO_END = "SignalException: "
"""What torchrun raises for a signal, from the moment on in which it starts its ranks."""


@dataclass(frozen=True)
class ReplicaFacts:
    """Everything on record about one replica of a started attempt."""

    index: int
    running: bool
    """Its supervisor lives."""
    exit: Exit | None = None
    ranks: tuple[RankExit, ...] = ()
    ranks_started: int = 0
    torchrun_said: str = ""
    """Its last line, where it has started no rank and ended."""
    termination: Termination | None = None
    drill: Drill | None = None
    lost: Lost | None = None


@dataclass(frozen=True)
class AttemptFacts:
    """What is on record about the attempt as a whole; times are seconds since the epoch."""

    replicas: tuple[ReplicaFacts, ...]
    stop: Stop | None = None
    killed: float | None = None
    cut_short: str = ""
    """Why its start was, where it was: what ran of it we put to an end."""
    rebooted: bool = False
    """Whether the machine was, since it was started."""


def judge(facts: AttemptFacts) -> tuple[ReplicaObservation, ...]:
    """One observation a replica."""
    return tuple(_judge(replica, facts) for replica in facts.replicas)


def _judge(replica: ReplicaFacts, facts: AttemptFacts) -> ReplicaObservation:
    end = replica.exit
    disrupted, reason = _taken(replica, facts)
    termination = replica.termination
    if unwritten := _nothing_could_begin(replica, facts):
        disrupted, reason = False, ""
        termination = Termination("failed", 0, 0, unwritten, storage_unavailable=True)
    if replica.running:
        state = ReplicaState.RUNNING
        ended_at = None
    else:
        state = ReplicaState.SUCCEEDED if end is not None and end.code == 0 else ReplicaState.FAILED
        ended_at = end.ended if end is not None else _first_known(replica, facts)
    return ReplicaObservation(
        index=replica.index,
        state=state,
        reason=reason,
        disrupted=disrupted,
        out_of_memory=replica.lost is not None and replica.lost.out_of_memory and replica.drill is None,
        torchrun_said=replica.torchrun_said,
        exit_code=None if end is None else end.code,
        exit_signal=None if end is None else end.signal,
        termination=termination,
        ranks=replica.ranks,
        ended_at=ended_at,
    )


def _nothing_could_begin(replica: ReplicaFacts, facts: AttemptFacts) -> str:
    """Why it began no rank, where its disk took not even word of that; empty where that was not it."""
    lost = replica.lost
    if lost is None or replica.running or replica.ranks_started or replica.termination is not None:
        return ""
    others = replica.drill is not None or lost.out_of_memory or facts.cut_short or facts.rebooted
    return "" if others or _lost_by_us(replica, facts) else lost.unwritten


def _taken(replica: ReplicaFacts, facts: AttemptFacts) -> tuple[bool, str]:
    """Whether somebody outside took the replica, and the evidence."""
    if replica.drill is not None:
        how = "killed" if replica.drill.kind == "kill" else "given notice"
        return True, f"Drilled: {how} on request"
    end = replica.exit
    if facts.cut_short and (end is None or end.bad):
        return True, f"CutShort: {facts.cut_short}"
    if replica.lost is not None and replica.lost.out_of_memory:
        if replica.lost.limit is not None:
            return False, f"OutOfMemory: it reached its limit of {replica.lost.limit / 2**20:.0f} MiB"
        return False, "OutOfMemory: the kernel killed a process for memory"
    if not replica.running and end is None and not _lost_by_us(replica, facts):
        if facts.rebooted:
            return True, "Vanished: this machine went down, and was booted since"
        if replica.lost is not None and replica.lost.unwritten:
            return True, f"Vanished: how its supervisor ended is not known: {replica.lost.unwritten}"
        return True, "Vanished: its supervisor ended without a trace, killed from outside"
    if end is not None and end.signal in KILLERS and not _ours(end.ended, facts):
        text = f"Killed: torchrun got {_name(end.signal)} from outside"
        if end.signal == signal.SIGKILL:
            return True, text  # no peer's failure leads to this
        return _unless_victim(replica, facts, end.ended, text)
    for rank in replica.ranks:
        if rank.signal in KILLERS and not _ours(rank.ended, facts):
            text = f"Killed: rank {rank.rank} got {_name(rank.signal)} from outside"
            if rank.signal == signal.SIGKILL and not _failed_before(replica, rank.ended):
                return True, text
            taken = _unless_victim(replica, facts, rank.ended, text)
            if taken[0]:
                return taken
    if end is not None and end.bad and not _ours(end.ended, facts):
        untold = replica.ranks_started - len(replica.ranks)
        failed = any(bad(rank) for rank in replica.ranks)
        if untold and (not failed or lost_its_peer(replica.termination, replica.ranks)):
            # As with SIGKILL above: torchrun tells of it long after the peers have crashed.
            return True, f"Vanished: {untold} of its ranks ended without a trace, killed from outside"
        if replica.ranks and not untold and not failed:
            text = "Terminated: torchrun was told to end while its ranks ended well"
            return _unless_victim(replica, facts, end.ended, text)
        if _TOLD_TO_END in replica.torchrun_said:
            text = "Terminated: torchrun was told to end before it had started a rank"
            return _unless_victim(replica, facts, end.ended, text)
    return False, "Killed: by Holdfast, with its peers" if facts.killed and not replica.running else ""


def _failed_before(replica: ReplicaFacts, ended: float) -> bool:
    """Whether a rank failed by itself, whose torchrun then ends its other ranks, at last by SIGKILL."""
    earlier = [
        rank.ended
        for rank in replica.ranks
        if bad(rank) and rank.signal not in KILLERS and rank.ended < ended
    ]
    if not earlier:
        return False
    seen_late = ended - min(earlier) < LATE_SECONDS
    return not (seen_late and lost_its_peer(replica.termination, replica.ranks))


def _unless_victim(replica: ReplicaFacts, facts: AttemptFacts, ended: float, text: str) -> tuple[bool, str]:
    """A replica whose end follows another bad end is that one's victim."""
    earlier = [rank for other in facts.replicas for rank in other.ranks if bad(rank) and rank.ended < ended]
    if earlier:
        first = min(earlier, key=lambda rank: rank.ended)
        return False, f"Ended after rank {first.rank}"
    for other in facts.replicas:
        if other.index != replica.index and other.exit and other.exit.bad and other.exit.ended < ended:
            return False, f"Ended after replica {other.index}"
    return True, text


def _ours(ended: float | None, facts: AttemptFacts) -> bool:
    """Whether our own stop or kill can have caused an end at this time (None: unknown)."""
    causes = [facts.killed] if facts.killed is not None else []
    if facts.stop is not None:
        causes.append(facts.stop.time)
    return any(ended is None or cause <= ended for cause in causes)


def _lost_by_us(replica: ReplicaFacts, facts: AttemptFacts) -> bool:
    """Of one that left no word of its end."""
    lost = replica.lost
    return (lost is not None and lost.ours) or _ours(None if lost is None else lost.time, facts)


def _first_known(replica: ReplicaFacts, facts: AttemptFacts) -> float | None:
    """When a replica that left no exit file ended, as well as anybody knows."""
    if replica.lost is not None:
        return replica.lost.time
    if replica.drill is not None:
        return replica.drill.time
    return facts.killed


def _name(number: int | None) -> str:
    return signal.Signals(number).name if number else "no signal"
