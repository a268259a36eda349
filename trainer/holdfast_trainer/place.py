"""Where this process stands: what the engine told it through the environment, with defaults for none."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from . import contract
from .checkpoint import CheckpointError
from .checkpoint.directory import check_fence
from .contract import RunDir
from .parallel import Gang

DEFAULT_RUN_DIR = "holdfast-run"


@dataclass(frozen=True)
class Place:
    """Read once at start; `attempt` is None where no engine numbered it."""

    run_dir: RunDir
    attempt: int | None
    termination: Path
    grace_seconds: float
    host: str
    port: int

    @classmethod
    def read(cls, run_dir: str | Path | None = None) -> Place:
        """From the environment; `run_dir` counts where HOLDFAST_RUN_DIR is not set."""
        env = os.environ
        attempt = env.get(contract.ENV_ATTEMPT)
        return cls(
            RunDir(Path(env.get(contract.ENV_RUN_DIR) or run_dir or DEFAULT_RUN_DIR).absolute()),
            int(attempt) if attempt else None,
            Path(env.get(contract.ENV_TERMINATION_LOG, contract.DEFAULT_TERMINATION_LOG)),
            float(env.get(contract.ENV_GRACE_SECONDS) or contract.DEFAULT_GRACE_SECONDS),
            env.get(contract.ENV_HOST, "127.0.0.1"),
            int(env.get(contract.ENV_PORT) or 0),
        )

    def admit(self, gang: Gang) -> int:
        """This attempt's number, with the fence at it; alone, one more than the fence. Collective.

        Raises CheckpointError on every rank where the run directory cannot be written, Fenced where a
        newer attempt was admitted already.
        """
        answer = gang.broadcast(self._admit() if gang.rank == 0 else None)
        if isinstance(answer, CheckpointError):
            raise answer
        return int(answer)

    def _admit(self) -> int | CheckpointError:
        run = self.run_dir
        try:
            attempt = self.attempt or contract.read_fence(run) + 1
            contract.raise_fence(run, attempt)
            check_fence(run, attempt)
            run.checkpoints.mkdir(exist_ok=True)
            run.attempt(attempt).mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            return CheckpointError(
                f"run directory {run.path} cannot be used: {error}. Name another one, or mend it"
            )
        except CheckpointError as error:
            return error
        return attempt


def process_start() -> float:
    """When this process began, in seconds since the epoch (proc_pid_stat(5), field 22)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
