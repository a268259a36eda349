"""What an ended attempt was: one incident, however many of its processes crashed.

When one replica goes, its peers crash on the broken connection, hang, or are killed by us. Those are
victims and never counted; the verdict comes from the first cause:

1. every replica finished                       -> Finished
2. a configuration error, by message or code 78 -> ConfigError: no neighbour's loss can cause it; Failed where
   an attempt before has trained as it is (decide.py)
3. a stop was asked for                         -> Suspended; what failed on the way is in the reason
4. a replica the platform took                  -> LostNode where its node went with it, else Disrupted;
   whose queue took it back for good             -> Suspended, and the job with it
   one that was shut out of its run directory, by an attempt that is not on record -> Disrupted
   one evicted for what it wrote itself       -> Failed: as a disruption it would be tried again for ever
   one whose node could not start it, or that somebody's init container did not let start
                                                -> Unschedulable, as where the node keeps it waiting
   what Holdfast ended the attempt for         -> Hung, Unschedulable or ImagePull, as it put on record;
   a hang that a node explains which fell silent -> LostNode: its peers wait for it, and end on that
5. a replica that got a notice and said so (`interrupted`), unless a rank had failed before it ended:
   torchrun also ends the peers of a failed rank by SIGTERM, those in its own replica too, and we those of a
   failed replica; a fault must not pass for a disruption, or it would be tried again for ever -> Disrupted
6. a replica that fell silent, when all that the others tell of is its broken connection -> Disrupted
7. the earliest of the other bad ends that tells of more than its broken connection, else the earliest
                                                -> OutOfMemory, Hung or Failed; StorageUnavailable where
   its run directory had no room to begin, or that or its object store did not answer: that passes, and
   explains the hang of those who waited for it
"""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass
from itertools import dropwhile

from holdfast_controller.cluster import AttemptObservation, RankExit, ReplicaObservation, ReplicaState
from holdfast_controller.jobs import Verdict
from holdfast_trainer.contract import CUT, EXIT_CONFIG_ERROR, NO_MEMORY, Termination

from .superseded import why_superseded

KILLERS = (signal.SIGKILL, signal.SIGTERM)
"""By which processes are ended from outside: torchrun's ranks by torchrun, replicas by Holdfast."""
_TRACEBACK = "Traceback (most recent call last):"
_MARK = re.compile(r"(?m)^\[rank\d+\]: ")
"""Before each line of a traceback that PyTorch prints where a process group was made."""


@dataclass(frozen=True)
class Incident:
    """How an attempt ended and why, in a sentence. `replica` is the first cause, where there is one."""

    verdict: Verdict
    reason: str
    replica: int | None = None


def classify(
    observation: AttemptObservation,
    ended_for: Incident | None = None,
    superseded: tuple[int, int] | None = None,
) -> Incident:
    """The incident of an attempt that is over (`gone`).

    `ended_for`: what Holdfast ended it for; `superseded`: see superseded_by.
    """
    replicas = observation.replicas
    if replicas and all(finished(replica) for replica in replicas):
        return Incident(Verdict.FINISHED, "every replica finished")
    for replica in replicas:
        if _config_error(replica):
            return Incident(Verdict.CONFIG_ERROR, _say(replica), replica.index)
    if observation.stopping:
        return _suspended(replicas)
    taken = [replica for replica in replicas if replica.disrupted and not finished(replica)]
    if taken:
        if observation.put_aside:
            return Incident(Verdict.SUSPENDED, observation.put_aside)
        first = min(taken, key=_bad_end)
        verdict = Verdict.LOST_NODE if first.lost_node else Verdict.DISRUPTED
        return Incident(verdict, f"replica {first.index}: {first.reason}", first.index)
    if superseded is not None:
        index, newer = superseded
        why = why_superseded(observation.attempt, newer)
        return Incident(Verdict.DISRUPTED, f"replica {index}: {why}", index)
    for replica in replicas:
        if replica.over_limit and not finished(replica):
            return Incident(Verdict.FAILED, f"replica {replica.index}: {replica.over_limit}", replica.index)
    for replica in replicas:
        if why := replica.not_started:
            return Incident(Verdict.UNSCHEDULABLE, f"replica {replica.index}: {why}", replica.index)
    lost = next((replica for replica in replicas if replica.lost_node and not finished(replica)), None)
    if ended_for is not None:
        hung = ended_for.verdict is Verdict.HUNG
        return _fell_silent(lost, ended_for.reason) if hung and lost is not None else ended_for
    failures = [replica for replica in replicas if _failed(replica)]
    noticed = [replica for replica in replicas if _interrupted(replica)]
    # Ends are told in whole seconds on a cluster: a peer's broken connection may seem to come first.
    causes = [replica for replica in failures if not _only_lost_its_peer(replica)]
    faults = [replica for replica in causes if not _told_to_end(replica)]
    if noticed and not any(_bad_end(fault) < _any_end(notice) for fault in faults for notice in noticed):
        first = min(noticed, key=_any_end)
        return Incident(Verdict.DISRUPTED, f"replica {first.index} was given notice and saved", first.index)
    if lost is not None and all(_waited_for_a_peer(failure) for failure in failures):
        return _fell_silent(lost, _say(failures[0]) if failures else "")
    silent = [replica for replica in replicas if _silent(replica)]
    if failures and silent and all(_only_lost_its_peer(failure) for failure in failures):
        return Incident(
            Verdict.DISRUPTED,
            f"replica {silent[0].index} fell silent, and its peers lost the connection to it",
            silent[0].index,
        )
    if failures:
        if any(_kind(replica) is Verdict.STORAGE_UNAVAILABLE for replica in causes):
            causes = [replica for replica in causes if _kind(replica) is not Verdict.HUNG]
        first = min(causes or failures, key=_bad_end)
        return Incident(_kind(first), _say(first), first.index)
    return Incident(Verdict.DISRUPTED, "it ended without a trace: nothing says who ended it")


def finished(replica: ReplicaObservation) -> bool:
    """The trainer's own word counts before the exit code; other commands have the code alone."""
    if replica.termination is not None:
        return replica.termination.outcome == "finished"
    return replica.state is ReplicaState.SUCCEEDED


def bad(rank: RankExit) -> bool:
    """Whether a rank's process ended otherwise than by exit code 0."""
    return rank.code != 0


_LOST_PEER = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|Broken pipe|remote process exit(?:ed|ing)"  # gloo, NCCL
    r"|Connection was likely closed|Timed out waiting \d+ms for (?:recv|send)"  # the store; gloo
    r"|Watchdog caught collective operation timeout"  # NCCL
)
"""How PyTorch tells a rank that another one is gone, or says nothing any more."""
_AFTER_WORDS = (1, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""With which the trainer leaves a rank that has said why (ending.py)."""
_OWN_CONNECTION = re.compile(r"(?:ConnectionReset|ConnectionAborted|BrokenPipe)Error|\[Errno \d+\]")
"""How Python tells of a connection or a pipe: those between ranks are none of Python's."""


def lost_its_peer(message: Termination | None, ranks: tuple[RankExit, ...]) -> bool:
    """Whether all that a replica has to say is that another one went away: by the trainer's message, or where
    there is none, as of a script that has nothing of Holdfast, by what its ranks wrote last."""
    if message is not None:
        return message.outcome == "failed" and _names_lost_peer(message.error)
    ended = [rank for rank in ranks if bad(rank) and rank.signal not in KILLERS]
    first = min(ranks, key=lambda rank: rank.ended, default=None)
    return first in ended and all(_tells_of_lost_peer(rank) for rank in ended)


def _names_lost_peer(error: str) -> bool:
    return bool(_LOST_PEER.search(error)) and not _OWN_CONNECTION.search(error)


def _tells_of_lost_peer(rank: RankExit) -> bool:
    return _names_lost_peer(_last_words(rank.said))


def _only_lost_its_peer(replica: ReplicaObservation) -> bool:
    """Of several ranks in a replica the first to speak is heard: the kernel may know of a worse end there. By
    SIGABRT NCCL, too, ends a rank that waited for a peer in vain."""
    worse = replica.out_of_memory or (_crashed(replica) and _first_to_end(replica).signal != signal.SIGABRT)
    return lost_its_peer(replica.termination, replica.ranks) and not worse


def _crashed(replica: ReplicaObservation) -> bool:
    """Whether the first of its ranks to end did so by itself and without a word, as by SIGSEGV: what the
    others there have to say, of a notice or a broken connection, came of that."""
    if not replica.ranks or _first_to_end(replica).signal in KILLERS:
        return False
    return _first_to_end(replica).code not in (0, *_AFTER_WORDS)


def _first_to_end(replica: ReplicaObservation) -> RankExit:
    return min(replica.ranks, key=lambda rank: rank.ended)


def _waited_for_a_peer(replica: ReplicaObservation) -> bool:
    """Whether another one's silence explains its end."""
    return _only_lost_its_peer(replica) or _kind(replica) is Verdict.HUNG


def _fell_silent(replica: ReplicaObservation, said: str) -> Incident:
    """`said`: what its peers ended with, for that they waited for it."""
    more = f" ({said})" if said else ""
    return Incident(Verdict.LOST_NODE, f"replica {replica.index}: its node fell silent{more}", replica.index)


def _silent(replica: ReplicaObservation) -> bool:
    """It ended without a word and without a fault of its own on record: killed, by us at the latest."""
    return (
        replica.termination is None
        and replica.state is ReplicaState.FAILED
        and replica.exit_code is None
        and all(rank.signal in KILLERS for rank in replica.ranks)
    )


def _suspended(replicas: tuple[ReplicaObservation, ...]) -> Incident:
    for replica in replicas:
        message = replica.termination
        if message is not None and message.outcome in ("failed", "hung"):
            return Incident(
                Verdict.SUSPENDED, f"stopped on request, but not cleanly: {_say(replica)}", replica.index
            )
    return Incident(Verdict.SUSPENDED, "stopped on request")


def _config_error(replica: ReplicaObservation) -> bool:
    if replica.termination is not None and replica.termination.config_error:
        return True
    return EXIT_CONFIG_ERROR in (replica.exit_code, *(rank.code for rank in replica.ranks))


def _interrupted(replica: ReplicaObservation) -> bool:
    message = replica.termination
    return message is not None and message.outcome == "interrupted" and not _crashed(replica)


def _failed(replica: ReplicaObservation) -> bool:
    """Ended badly by itself; a replica that only ended after its peers, by our hand, did not."""
    if finished(replica) or _interrupted(replica) or replica.disrupted:
        return False
    if replica.termination is not None or replica.out_of_memory:
        return True
    if any(bad(rank) and rank.signal not in KILLERS for rank in replica.ranks):
        return True
    return replica.exit_code not in (0, None)


def _told_to_end(replica: ReplicaObservation) -> bool:
    """Whether SIGTERM is all that is known of its end, as of one that had no words for a notice yet."""
    ends = {rank.signal for rank in replica.ranks if bad(rank)}
    return replica.termination is None and ends == {signal.SIGTERM}


def _bad_end(replica: ReplicaObservation) -> float:
    """When it first ended badly; for ever after the others where nobody knows."""
    ends = [rank.ended for rank in replica.ranks if bad(rank)]
    if not ends and replica.ended_at is not None:
        ends = [replica.ended_at]
    return min(ends, default=math.inf)


def _any_end(replica: ReplicaObservation) -> float:
    """When the first of its ranks ended, or, where none is on record, all of it: a notice may be ours, as the
    rest of a failed attempt is ended. Where nobody knows when, it is nobody's victim."""
    known = -math.inf if replica.ended_at is None else replica.ended_at
    return min((rank.ended for rank in replica.ranks), default=known)


def _kind(replica: ReplicaObservation) -> Verdict:
    message = replica.termination
    if message is not None and message.storage_unavailable:
        return Verdict.STORAGE_UNAVAILABLE
    if replica.out_of_memory or _names_memory(_words(replica)):
        return Verdict.OUT_OF_MEMORY
    if message is not None and message.outcome == "hung":
        return Verdict.HUNG
    return Verdict.FAILED


_MEMORY = (
    *("ran out of memory in step", "ran out of memory before its first step"),
    *("MemoryError", "CUDA out of memory"),
    *NO_MEMORY,
)
"""As told by the trainer (faults.py), or, before it can explain anything, by Python and PyTorch."""


def _words(replica: ReplicaObservation) -> str:
    """Of its end: the trainer's message, else what the rank that ended badly first wrote last."""
    if replica.termination is not None:
        return replica.termination.error
    first = _first_cause(replica)
    return "" if first is None else _last_words(first.said)


def _first_cause(replica: ReplicaObservation) -> RankExit | None:
    """Of its ranks the first to end badly; another one where that lost but the connection to it, whose own
    end took longer."""
    ranks = sorted((rank for rank in replica.ranks if bad(rank)), key=lambda rank: rank.ended)
    if ranks and _tells_of_lost_peer(ranks[0]):
        causes = (r for r in ranks if r.signal not in KILLERS and not _tells_of_lost_peer(r))
        return next(causes, ranks[0])
    return ranks[0] if ranks else None


def _names_memory(error: str) -> bool:
    return any(sign in error for sign in _MEMORY)


def _say(replica: ReplicaObservation) -> str:
    """The evidence: the trainer's message, else how its first bad rank ended, else its own exit."""
    where = f"replica {replica.index}"
    said = replica.termination.error.strip() if replica.termination is not None else ""
    if said and not _is_of_a_victim(replica):
        assert replica.termination is not None
        if replica.termination.config_error:  # a line for each thing that is wrong
            return f"{where}: {'; '.join(said.splitlines())}"
        return f"{where}: {_exception_in(said)}"
    if replica.out_of_memory:
        return f"{where}: {replica.reason or 'the kernel killed it for memory'}{_peak(replica)}"
    first = _first_cause(replica)
    if first is not None:
        words = _exception_in(first.said).strip()
        said = f"; it last said: {words}" if words else ""
        return f"{where}: rank {first.rank} {_how(first.code, first.signal)}{said}"
    how = f"{where}: {_how(replica.exit_code, replica.exit_signal)}"
    return f"{how} before it had started a rank: {replica.torchrun_said}" if replica.torchrun_said else how


def _is_of_a_victim(replica: ReplicaObservation) -> bool:
    """Whether what a replica says is less than what is known of it: a rank of it that could say nothing was
    the first to end."""
    if lost_its_peer(replica.termination, replica.ranks):
        return not _only_lost_its_peer(replica)
    assert replica.termination is not None
    return replica.termination.outcome == "interrupted" and _crashed(replica)


def _exception_in(said: str) -> str:
    """Of a traceback the line that names the exception, and the last one where that goes on for more: of any
    fault of CUDA that says how to compile, of one of NCCL what failed. Of what is no traceback the last line.
    The log tail has all of it. Where an exception was met while another was handled, it counts.
    """
    words = _last_words(said).split("\n")
    return " ... ".join(dict.fromkeys((words[0], words[-1])))


def _last_words(said: str) -> str:
    """Of a traceback what follows its frames, of anything else the last line."""
    lines = _MARK.sub("", said).splitlines() or [""]
    begins = next((at for at in reversed(range(len(lines))) if _TRACEBACK in lines[at]), None)
    if begins is None and lines[0].startswith(CUT):
        begins = 0
    if begins is None:
        return lines[-1]
    frames = dropwhile(lambda line: not line.startswith(" "), lines[begins + 1 :])
    return "\n".join(dropwhile(lambda line: line.startswith(" "), frames)) or lines[-1]


def _peak(replica: ReplicaObservation) -> str:
    """Which of its ranks had taken how much, where that is known: of the largest."""
    largest = max(replica.ranks, key=lambda rank: rank.peak_bytes or 0, default=None)
    if largest is None or not largest.peak_bytes:
        return ""
    return f"; rank {largest.rank} had {largest.peak_bytes / 2**20:.0f} MiB at its peak"


_NAMES = {number.value: number.name for number in signal.Signals}
_MEANINGS: dict[int, str] = {
    signal.SIGBUS: "a file that it had mapped was cut, its disk failed, or /dev/shm is full",
}
"""Of signals that the kernel sends for what a rank did not do itself."""


def _how(code: int | None, number: int | None) -> str:
    if number is not None:
        meaning = f" ({_MEANINGS[number]})" if number in _MEANINGS else ""
        return f"ended by {_NAMES.get(number, f'signal {number}')}{meaning}"
    return f"ended with exit code {code}" if code is not None else "ended without an exit code"
