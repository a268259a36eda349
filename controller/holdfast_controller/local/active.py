"""One started attempt: look after its processes, and say what is left of it.

Works from its directory and /proc alone, so it makes no difference whether this controller started it
or found it. When something was is told by the machine's clock, as everywhere; how long to wait is not, for
that clock may be set meanwhile, or go on while the machine sleeps (`Deadline`). `tend` is called often and
is cheap; whoever calls it, all who wait for changes are told.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property

import structlog

from holdfast_controller.cluster import AttemptObservation, Invalid, NotFound, NotReady, RankExit
from holdfast_controller.drills import DrillKind
from holdfast_controller.heartbeat import Heartbeat
from holdfast_trainer.contract import TAKES_NOTHING, Progress

from . import process
from .evidence import AttemptFacts, ReplicaFacts, judge
from .memory import MemoryGroup, parent_group
from .record import AttemptFiles, Drill, Exit, Launch, Lost, Stop

log = structlog.get_logger(__name__)

APPEARS_SECONDS = 3.0
"""A process forked just before the controller died shows itself in /proc within this time."""
SCAN_SECONDS = 0.2
STACKS_SECONDS = 4.0
"""For ranks that are killed to write their stacks."""
OUT_OF_MEMORY_SECONDS = 2.0
"""The kernel's count and an end by SIGKILL this close together belong together."""
INTERRUPTED = "its start was interrupted, and what ran of it was put to an end"


@dataclass
class MemoryKills:
    """When the kernel's count of processes killed for memory last grew, as seen by this controller."""

    count: int
    since: float
    grew: float = 0.0

    def look(self) -> None:
        count = process.out_of_memory_kills()
        if count > self.count:
            self.count, self.grew = count, time.time()

    def explains(self, ended: float, count_at_start: int) -> bool:
        """Whether an end by SIGKILL at this time was the kernel's doing."""
        if ended < self.since:  # nobody watched then: the count since the attempt's start has to do
            return self.count > count_at_start
        return abs(self.grew - ended) <= OUT_OF_MEMORY_SECONDS


class Deadline:
    """What is at most `most` seconds ahead on the machine's clock, and stays as far ahead whatever that clock
    shows later: a grace ends neither at once nor hours late."""

    def __init__(self, at: float, most: float):
        self._at = time.monotonic() + min(max(0.0, at - time.time()), most)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._at


class ActiveAttempt:
    """A started attempt, from its first process until nothing of it is left."""

    def __init__(
        self,
        files: AttemptFiles,
        launch: Launch,
        memory: MemoryKills,
        changed: Callable[[str], None],
        *,
        to_reap: Sequence[int] = (),
        refused: str = "",
        over: bool = False,
    ):
        """`to_reap` are children of ours that are none of its supervisors; `refused`: why not all of it could
        be started; `over`: its supervisors were started, and no process of it was left a moment ago."""
        self.files = files
        self.launch = launch
        self.progress: Progress | None = None
        self._address: str | None = None
        self.beat = Heartbeat(time.monotonic())
        self.gone = False
        self._memory = memory
        self._rebooted = launch.boot != process.boot_id()
        self._changed = changed
        self._running: dict[int, process.ProcessId] = {}
        self._watched: set[int] = set()
        """Replicas whose end is seen when it comes."""
        self._exits: dict[int, Exit | None] = {}
        self._ended_well: dict[int, Exit] = {}
        """By replica, as the kernel told us: a supervisor may not be able to write it down."""
        self._rank_exits: dict[int, RankExit] = {}
        self._stop = files.stop()
        self._killed = files.killed()
        self._drills = {i: d for i in range(launch.replicas) if (d := files.drill(i))}
        self._lost = {i: lost for i in range(launch.replicas) if (lost := files.lost(i))}
        self._deadline = _end_of_grace(self._stop) if self._stop else None
        self._drill_deadlines = {i: _end_of_grace(drill) for i, drill in self._drills.items()}
        self._stacks: Deadline | None = None
        self._appears = Deadline(launch.started + APPEARS_SECONDS, APPEARS_SECONDS)
        self._next_scan = Deadline(0.0, 0.0)
        self._helpers = list(to_reap)
        self._refused = refused
        self._over = over
        parent = parent_group()
        self._groups = (
            {i: MemoryGroup(parent, launch.uid, i) for i in range(launch.replicas)} if parent else {}
        )
        self._find_supervisors()
        self.tend()

    @property
    def key(self) -> str:
        return self.launch.key

    @property
    def address(self) -> str | None:
        """Where rank 0 tells its progress; also once the run directory was removed, in which it says so."""
        self._address = self.files.progress_address() or self._address
        return self._address

    @property
    def cleared(self) -> bool:
        """Whether it is gone, with its helpers and cgroups: nothing of it is to be tended any more."""
        return self.gone and not self._helpers and not self._groups

    def _find_supervisors(self) -> None:
        """Who runs each replica. Of a start that was cut short nobody knows, so it is put to an end."""
        for replica, supervisor in enumerate(self.launch.supervisors):
            if not self._rebooted and process.alive(supervisor):
                self._running[replica] = supervisor
                self._watched.add(replica)
            elif not self._rebooted:
                process.reap(supervisor.pid)
        if not self.launch.supervisors and self._killed is None and not self._rebooted:
            self.kill()
        if not self._over:
            self.repeat()

    def repeat(self) -> None:
        """Do again what is on record as asked for: the controller may have died before it was done."""
        if self._killed is not None:
            process.kill_all(self.launch.uid)
        elif self._stop is not None:
            self._notify(list(self._running))
        for replica, drill in self._drills.items():
            if replica in self._running:
                self._disrupt(replica, drill.kind)

    # -------------------------------------------------------------- looking

    def tend(self) -> None:
        """Notice ends, keep deadlines, and tell where something changed."""
        if self.gone:
            self._clear_away()
            return
        now = time.time()
        self._memory.look()
        changed = self._notice_rank_exits()
        changed |= self._notice_replica_ends(now)
        self._keep_deadlines()
        if not self._running and self._next_scan.passed:
            self._next_scan = Deadline(now + SCAN_SECONDS, SCAN_SECONDS)
            if self._killed is not None and not self._over:
                process.kill_all(self.launch.uid)
            settled = bool(self.launch.supervisors) or self._appears.passed
            self.gone = self._over or (settled and not process.find(self.launch.uid))
            changed |= self.gone
        self._clear_away()
        if changed:
            self._changed(self.key)

    def _clear_away(self) -> None:
        """What has ended; a process that the kernel still takes apart is left until that is done."""
        self._helpers = [pid for pid in self._helpers if not process.reap(pid)]
        if self.gone:
            self._groups = {replica: group for replica, group in self._groups.items() if not group.remove()}

    def _notice_rank_exits(self) -> bool:
        before = len(self._rank_exits)
        for replica in range(self.launch.replicas):
            for rank in self.launch.ranks_of(replica):
                if rank not in self._rank_exits and (end := self.files.rank_exit(rank)):
                    self._rank_exits[rank] = end
                    if end.signal == signal.SIGKILL:
                        self._note_memory(replica, end.ended)
        return len(self._rank_exits) != before

    def _notice_replica_ends(self, now: float) -> bool:
        changed = False
        for replica, supervisor in list(self._running.items()):
            if process.alive(supervisor):
                continue
            if process.ended_well(supervisor.pid):
                self._ended_well[replica] = Exit(now, code=0)
            del self._running[replica]
            changed = True
        for replica in range(self.launch.replicas):
            if replica in self._running or self._exits.get(replica):
                continue
            end = self.files.replica_exit(replica) or self._ended_well.get(replica)
            self._exits[replica] = end
            if end is None and replica not in self._lost:
                watched, killed = replica in self._watched, self._killed is not None
                memory = not killed and replica not in self._drills and self._out_of_memory(replica, now)
                ended = now if watched else self._last_heard
                self._write_lost(replica, Lost(ended, memory, ours=watched and killed))
            elif end is not None and end.signal == signal.SIGKILL:
                self._note_memory(replica, end.ended)
        return changed

    @cached_property
    def _last_heard(self) -> float:
        """Of what ended while nobody watched, as with its machine, which may then have been off for a night:
        when it last wrote, or we did something to it. Asked before that is written down for one replica."""
        acts = [self._killed, *(one.time for one in (self._stop, *self._drills.values()) if one is not None)]
        known = [one for one in (self.files.last_written(), *acts) if one is not None]
        return min(time.time(), max(self.launch.started, *known))

    def _note_memory(self, replica: int, ended: float) -> None:
        self._memory.look()
        ours = self._killed is not None and self._killed <= ended
        if replica in self._lost or ours or replica in self._drills:
            return
        if self._out_of_memory(replica, ended):
            group = self._groups.get(replica)
            self._write_lost(replica, Lost(ended, True, group.limit if group is not None else None))

    def _out_of_memory(self, replica: int, ended: float) -> bool:
        """Whether the kernel took a process of it that ended then: by its group's count, which knows no other
        job's; by the machine's where it has no group."""
        group = self._groups.get(replica)
        kills = group.kills() if group is not None else None
        if kills is not None:
            return kills > 0
        if self._rebooted:  # the machine counts from its boot on
            return False
        return self._memory.explains(ended, self.launch.out_of_memory_kills)

    def _write_lost(self, replica: int, lost: Lost) -> None:
        self._lost[replica] = lost
        fault = self._keep(lambda: self.files.write_lost(replica, lost))
        if fault is not None and fault.errno in TAKES_NOTHING:
            said = f"cannot write into {self.files.directory}: {fault.strerror}"
            self._lost[replica] = replace(lost, unwritten=said)

    def _keep_deadlines(self) -> None:
        if self._deadline is not None and self._deadline.passed and self._killed is None:
            self.kill()
        for replica, deadline in self._drill_deadlines.items():
            if replica in self._running and deadline.passed:
                process.kill_all(self.launch.uid, replica)

    def _keep(self, write: Callable[[], None]) -> OSError | None:
        """Put evidence on disk; a full disk must not keep us from acting on what we know. Why it failed."""
        try:
            write()
        except OSError as error:
            log.warning("cannot keep a record", job=self.key, error=str(error))
            return error
        return None

    def observe(self) -> AttemptObservation:
        """What is known now; the replicas' ends are judged by evidence.py."""
        replicas = tuple(self._facts(replica) for replica in range(self.launch.replicas))
        return AttemptObservation(
            attempt=self.launch.attempt,
            exists=True,
            gone=self.gone,
            replicas=judge(
                AttemptFacts(replicas, self._stop, self._killed, self._cut_short(), self._rebooted)
            ),
            stopping=self._stop is not None,
            progress=self.progress,
            silence=self.beat.silence,
            started_at=datetime.fromtimestamp(self.launch.started, UTC),
        )

    def _cut_short(self) -> str:
        """Why its start was; empty where it was not."""
        if self.launch.supervisors:
            return ""
        return f"not all of it could be started: {self._refused}" if self._refused else INTERRUPTED

    def _facts(self, replica: int) -> ReplicaFacts:
        ranks = self.launch.ranks_of(replica)
        ranks_started = sum(self.files.rank_started(rank) for rank in ranks)
        says_why = replica not in self._running and not ranks_started
        return ReplicaFacts(
            index=replica,
            running=replica in self._running,
            exit=self._exits.get(replica),
            ranks=tuple(self._rank_exits[rank] for rank in ranks if rank in self._rank_exits),
            ranks_started=ranks_started,
            torchrun_said=self.files.torchrun_said(replica) if says_why else "",
            termination=self.files.termination(replica),
            drill=self._drills.get(replica),
            lost=self._lost.get(replica),
        )

    # --------------------------------------------------------------- acting

    def stop(self, grace_seconds: float) -> None:
        """Notice to every replica, SIGKILL after the grace. A second stop changes nothing."""
        if self.gone or self._stop is not None:
            return
        self.tend()
        now = time.time()
        self._stop = stop = Stop(now, now + grace_seconds)
        self._deadline = _end_of_grace(stop)
        self._keep(lambda: self.files.write_stop(stop))
        self._notify(list(self._running))

    def kill(self, *, stacks: bool = False) -> None:
        """SIGKILL all that is left, and again at every look until nothing is; with `stacks` a little later,
        after its ranks were made to tell where they stand."""
        if self.gone:
            return
        first = self._killed is None
        if self._killed is None:
            if self._notice_rank_exits() | self._notice_replica_ends(time.time()):
                self._changed(self.key)
            self._killed = killed = time.time()
            self._keep(lambda: self.files.write_kill(killed))
        if first and stacks:
            self._stacks = Deadline(self._killed + STACKS_SECONDS, STACKS_SECONDS)
            self._helpers.append(process.tell_stacks(self.launch.uid, STACKS_SECONDS))
        elif not stacks or self._stacks is None or self._stacks.passed:
            process.kill_all(self.launch.uid)
        self._next_scan = Deadline(0.0, 0.0)

    def drill(self, replica: int, kind: DrillKind, grace_seconds: float) -> None:
        """Disrupt one replica. Raises NotFound, NotReady, Invalid."""
        if not 0 <= replica < self.launch.replicas:
            raise NotFound(
                f"job {self.key} has no replica {replica}; they are numbered 0 to {self.launch.replicas - 1}"
            )
        self.tend()
        if replica not in self._running:
            raise NotReady(f"replica {replica} of job {self.key} is not running, so it cannot be disrupted")
        if kind is DrillKind.NODE:
            raise Invalid("node: one machine cannot be taken from what runs on it: try kill or notice")
        if kind is DrillKind.FREEZE:
            self._freeze(replica)
            return
        if kind is DrillKind.OOM:
            self._overfill(replica)
            return
        now = time.time()
        grace = 0.0 if kind is DrillKind.KILL else grace_seconds
        self._drills[replica] = drill = Drill(kind, now, now + grace)
        self._drill_deadlines[replica] = _end_of_grace(drill)
        self._keep(lambda: self.files.write_drill(replica, drill))
        self._disrupt(replica, kind)

    def _disrupt(self, replica: int, kind: DrillKind) -> None:
        if kind is DrillKind.KILL:
            process.kill_all(self.launch.uid, replica)
        else:
            self._notify([replica])

    def _freeze(self, replica: int) -> None:
        """Stop the replica's last rank. Not on record as a drill: what comes of it is to be found out."""
        rank = self.launch.ranks_of(replica)[-1]
        if self.launch.replicas * self.launch.processes_per_replica < 2:
            raise Invalid(f"freeze: job {self.key} has one rank, so no peer would notice that it hangs")
        frozen = process.find(self.launch.uid, replica, rank)
        if not frozen:
            raise NotReady(f"rank {rank} of job {self.key} has not started yet, so it cannot be frozen")
        for one in frozen:
            process.send(one, signal.SIGSTOP)

    def _overfill(self, replica: int) -> None:
        """Use up the replica's memory. Not on record as a drill either: the kernel tells what comes of it."""
        group = self._groups.get(replica)
        if group is None or group.limit is None:
            raise Invalid(
                f"oom: nothing limits the memory of job {self.key} here; give it resources.memory, on a "
                "machine that lets Holdfast make cgroups (the dry run says so)"
            )
        ranks = process.ranks_of(self.launch.uid, replica)
        if not ranks:
            raise NotReady(f"no rank of replica {replica} of job {self.key} runs yet, so none can grow")
        try:
            self._helpers.append(group.overfill(self.launch.uid, [rank.pid for rank in ranks]))
        except OSError as error:
            raise NotReady(f"oom: {error.strerror or error}; try again") from error

    def _notify(self, replicas: Sequence[int]) -> None:
        """SIGTERM to the supervisors: each passes it on once, so a repeat does no harm."""
        for replica in replicas:
            if supervisor := self._running.get(replica):
                process.send(supervisor, signal.SIGTERM)


def _end_of_grace(asked: Stop | Drill) -> Deadline:
    return Deadline(asked.deadline, asked.deadline - asked.time)
