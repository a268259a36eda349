"""How a rank goes on: the newest good checkpoint into the tracked parts, and what is told of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .account import Account
from .alike import together
from .checkpoint import CONFIGURATION, Skipped, WrongConfiguration, load_newest
from .contract import RunDir, is_count, read_lines
from .environment import NOT_DETERMINISTIC, VALIDATED_BY, differences
from .ledger import useful_seconds
from .parallel import Gang
from .place import process_seconds
from .training_state import TrainingState

log = logging.getLogger("holdfast")


@dataclass
class Marks:
    """When this process reached the stages of its start, in seconds of `time.monotonic`: the machine's clock
    may be set meanwhile."""

    process: float = field(default_factory=lambda: time.monotonic() - process_seconds())
    imported: float = field(default_factory=time.monotonic)
    rendezvous: float = 0.0
    build: float = 0.0
    loaded: float = 0.0

    def durations(self) -> dict[str, float]:
        """Seconds of each stage."""
        return {
            "import": self.imported - self.process,
            "rendezvous": self.rendezvous - self.imported,
            "build": self.build - self.rendezvous,
            "load": self.loaded - self.build,
        }

    def told(self) -> dict[str, float]:
        """The same as fields of contract.Progress."""
        seconds = {f"{stage}_seconds": seconds for stage, seconds in self.durations().items()}
        return {"process_time": time.time() - (time.monotonic() - self.process), **seconds}


@dataclass(frozen=True)
class Resumed:
    """Where a rank goes on."""

    step: int = 0
    rng: dict[str, Any] | None = None
    """Random state to restore when the loop begins; None where this rank had none of its own."""
    skipped: tuple[Skipped, ...] = ()
    """Newer checkpoints that could not be used."""
    differences: tuple[str, ...] = ()
    """What is not as it was where the checkpoint was written, so that bits may differ."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """What the checkpoint has of that."""
    saved_by: int = 0
    """The attempt that wrote the checkpoint; 0 where there was none."""


def resume(
    run_dir: RunDir,
    attempt: int,
    gang: Gang,
    config_hash: str,
    state: TrainingState,
    environment: dict[str, Any],
) -> Resumed:
    """Load the newest checkpoint that all ranks can verify. Collective; raises as `load_newest`.

    `environment` is this rank's; where others have something else, as on another processor, it is all of
    theirs from then on, as bits depend on each rank's.
    """
    told = together(gang.gather(dict(environment)))
    # What has no kernel that repeats its bits is added to, name by name, as it is found.
    environment.update({n: value for n, value in told.items() if n in environment and n != NOT_DETERMINISTIC})
    loaded, skipped = load_newest(
        run_dir, attempt, gang, config_hash, environment.get(CONFIGURATION), in_shards=state.in_shards
    )
    if loaded is None:
        return Resumed(skipped=tuple(skipped))
    try:
        forgotten = state.restore(loaded)
    except WrongConfiguration as error:
        raise WrongConfiguration(f"{error}; this one is {run_dir.path}") from error
    manifest = loaded.manifest
    differing = differences(manifest.environment, environment)
    if manifest.world_size != gang.world_size:
        differing.append(f"ranks: {manifest.world_size} -> {gang.world_size}")
    if gang.rank == 0:
        _tell(manifest.step, differing, forgotten)
        _tell_of_losses(manifest.environment.get(VALIDATED_BY), environment.get(VALIDATED_BY))
    own = None if loaded.own is None else loaded.own["rng"]
    return Resumed(
        manifest.step, own, tuple(skipped), tuple(differing), manifest.environment, manifest.attempt
    )


def _tell(step: int, differing: list[str], forgotten: list[str]) -> None:
    log.info("resumed from step %d", step)
    if forgotten:
        log.warning("the checkpoint also has %s, which nothing tracks now", ", ".join(forgotten))
    if differing:
        log.warning("the resume may not be bit-exact: %s", "; ".join(differing))


def _tell_of_losses(then: str | None, now: str | None) -> None:
    if then and now and then != now:
        log.warning(
            "%s, and before this it was %s: which checkpoints are the best is told by both losses, which "
            "cannot be compared; set it back, or have more of them stay",
            now,
            then,
        )


def record_start(
    account: Account, run_dir: RunDir, attempt: int, resumed: Resumed, marks: Marks, attention: str
) -> None:
    """Rank 0 tells how its attempt begins: progress, and the ledger's first line."""
    useful = useful_seconds(run_dir, attempt, resumed.step)
    skipped = (*_gone(run_dir, attempt, resumed), *resumed.skipped)
    account.telemetry.resumed(resumed.step, useful, marks.told())
    account.telemetry.attention(attention)
    for skip in skipped:
        log.warning("checkpoint of step %d was passed over: %s", skip.step, skip.reason)
    account.journal.event(
        "attempt_start",
        world_size=account.telemetry.progress.world_size,
        resumed_step=resumed.step,
        resumed_from=run_dir.checkpoint(resumed.step).name if resumed.step else None,
        useful_seconds=useful,
        attention=attention or None,
        skipped=[{"checkpoint": run_dir.checkpoint(s.step).name, "reason": s.reason} for s in skipped],
        differences=resumed.differences,
        startup=marks.durations(),
    )


def _gone(run_dir: RunDir, attempt: int, resumed: Resumed) -> tuple[Skipped, ...]:
    """The newest checkpoint that the attempt before had, where nothing of it is there to be read.

    Somebody emptied the directory, or a rule of the bucket did. To go on without a word would lose its work
    silently.
    """
    for number in sorted((one for one in run_dir.attempt_numbers() if one < attempt), reverse=True):
        lines = read_lines(run_dir.ledger(number))
        began = [line.get("resumed_step") for line in lines if line.get("event") == "attempt_start"]
        if not began:
            continue
        made = [line.get("step") for line in lines if line.get("event") == "checkpoint"]
        newest = max((step for step in (*began, *made) if is_count(step)), default=0)
        if newest <= resumed.step or newest in {skip.step for skip in resumed.skipped}:
            return ()
        reason = (
            f"it is gone, though attempt {number} had it: somebody removed it, or a rule of the store did"
        )
        return (Skipped(newest, reason),)
    return ()
