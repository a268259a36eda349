"""What the local engine writes into an attempt's directory, so that it survives the controller.

    engine.json            what was started: before the first process, and again with their pids
    engine-stop.json       a stop was asked for, and when the grace ends
    engine-kill.json       everything was told to end at once
    engine-drill-I.json    replica I is disrupted on purpose
    engine-lost-I.json     replica I ended without saying how, or by the kernel for memory

Each is written durably before what it records is done: after a crash the next controller does it
again, and nothing is ever put down to the wrong cause.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from holdfast_controller.cluster import RankExit
from holdfast_controller.drills import DrillKind
from holdfast_trainer.contract import RunDir, Termination, exists, legible, newest_bytes, replace_durably

from .process import ProcessId
from .slots import Allocation, Grant

SAID_BYTES = 1024


@dataclass(frozen=True)
class Launch:
    """engine.json. `supervisors` holds one process a replica, or nothing where the start was cut short."""

    key: str
    uid: str
    """of the attempt, see gang.attempt_uid"""
    attempt: int
    boot: str
    started: float
    """Seconds since the epoch."""
    master_port: int
    processes_per_replica: int
    out_of_memory_kills: int
    """The kernel's count on this machine before the start."""
    allocation: Allocation
    supervisors: tuple[ProcessId, ...] = ()

    @property
    def replicas(self) -> int:
        return len(self.allocation)

    def ranks_of(self, replica: int) -> range:
        """Static rendezvous numbers the ranks replica by replica."""
        return range(replica * self.processes_per_replica, (replica + 1) * self.processes_per_replica)


@dataclass(frozen=True)
class Stop:
    """engine-stop.json; seconds since the epoch."""

    time: float
    deadline: float


@dataclass(frozen=True)
class Drill:
    """engine-drill-I.json; seconds since the epoch."""

    kind: DrillKind
    time: float
    deadline: float


@dataclass(frozen=True)
class Lost:
    """engine-lost-I.json."""

    time: float
    """When it was noticed, seconds since the epoch; where nobody watched, when it was last heard of."""
    out_of_memory: bool
    limit: int | None = None
    """Bytes that it was held to, where that was the reason."""
    unwritten: str = ""
    """Why neither it nor we could write down how it ended, where its disk is full or read-only; never on
    record, then."""
    ours: bool = False
    """Whether it still ran when we killed all: the times do not tell where the clock was set in between."""


@dataclass(frozen=True)
class Exit:
    """replica-N.exit, written by the supervisor: exactly one of code and signal is set."""

    ended: float
    code: int | None = None
    signal: int | None = None

    @property
    def bad(self) -> bool:
        return self.code != 0


class AttemptFiles:
    """The engine's files of one attempt. Missing ones read as None; a torn one never exists."""

    def __init__(self, run: RunDir, attempt: int):
        self.run = run
        self.attempt = attempt
        self.directory = run.attempt(attempt)

    # ------------------------------------------------------------- engine's

    def launch(self) -> Launch | None:
        """Raises OSError where it is there and cannot be read: what runs would be taken for never started."""
        try:
            body = _parsed((self.directory / "engine.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        if body is None:
            return None
        grants = tuple(
            Grant(Fraction(g["cores"]), tuple(g["gpus"]), Fraction(g["share"])) for g in body["allocation"]
        )
        supervisors = tuple(ProcessId(p["pid"], p["started"]) for p in body["supervisors"])
        return Launch(**{**_known(Launch, body), "allocation": grants, "supervisors": supervisors})

    def write_launch(self, launch: Launch) -> None:
        body = asdict(launch)
        body["allocation"] = [
            {"cores": str(g.cores), "gpus": list(g.gpus), "share": str(g.share)} for g in launch.allocation
        ]
        replace_durably(self.directory / "engine.json", json.dumps(body))

    def forget_launch(self) -> None:
        (self.directory / "engine.json").unlink(missing_ok=True)

    def stop(self) -> Stop | None:
        body = _read(self.directory / "engine-stop.json")
        return None if body is None else Stop(**_known(Stop, body))

    def write_stop(self, stop: Stop) -> None:
        replace_durably(self.directory / "engine-stop.json", json.dumps(asdict(stop)))

    def killed(self) -> float | None:
        """When all of the attempt was killed by us."""
        body = _read(self.directory / "engine-kill.json")
        return None if body is None else float(body["time"])

    def write_kill(self, time: float) -> None:
        replace_durably(self.directory / "engine-kill.json", json.dumps({"time": time}))

    def drill(self, replica: int) -> Drill | None:
        body = _read(self.directory / f"engine-drill-{replica}.json")
        return None if body is None else Drill(DrillKind(body["kind"]), body["time"], body["deadline"])

    def write_drill(self, replica: int, drill: Drill) -> None:
        replace_durably(self.directory / f"engine-drill-{replica}.json", json.dumps(asdict(drill)))

    def lost(self, replica: int) -> Lost | None:
        body = _read(self.directory / f"engine-lost-{replica}.json")
        return None if body is None else Lost(**_known(Lost, body))

    def write_lost(self, replica: int, lost: Lost) -> None:
        replace_durably(self.directory / f"engine-lost-{replica}.json", json.dumps(asdict(lost)))

    # ------------------------------------------------------------ supervisors'

    def replica_exit(self, replica: int) -> Exit | None:
        end = _read(self.run.replica_exit(self.attempt, replica))
        return None if end is None else Exit(end["ended"], end.get("code"), end.get("signal"))

    def torchrun_said(self, replica: int) -> str:
        """The last line of it: of a traceback the one that names the exception."""
        try:
            newest = newest_bytes(self.run.replica_log(self.attempt, replica), SAID_BYTES)
        except OSError:
            return ""
        lines = newest.decode("utf-8", errors="replace").split("\n")
        said = (legible(line).strip() for line in reversed(lines))
        return next((line for line in said if line), "")

    def rank_exit(self, rank: int) -> RankExit | None:
        end = _read(self.run.rank_exit(self.attempt, rank))
        return None if end is None else RankExit.from_document(rank, end)

    def last_written(self) -> float:
        """When anybody last wrote into the directory, in seconds since the epoch; 0 where nobody can tell."""
        times = [0.0]
        with suppress(OSError), os.scandir(self.directory) as files:
            for one in files:
                with suppress(OSError):  # it is gone again
                    times.append(one.stat(follow_symlinks=False).st_mtime)
        return max(times)

    def rank_started(self, rank: int) -> bool:
        return exists(self.run.rank_log(self.attempt, rank))

    def termination(self, replica: int) -> Termination | None:
        try:
            text = self.run.termination(self.attempt, replica).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        return Termination.from_json(text)

    def progress_address(self) -> str | None:
        try:
            text = self.run.progress_address(self.attempt).read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        return text.strip() or None


def _known(record: type[Launch | Stop | Lost], body: dict[str, Any]) -> dict[str, Any]:
    """What of it this version reads: others write other keys too."""
    names = {field.name for field in fields(record)}
    return {name: value for name, value in body.items() if name in names}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return None


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(data)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None
