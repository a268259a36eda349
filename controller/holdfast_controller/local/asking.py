"""Ask Holdfast's own trainer, in a process, whether it takes a job's configuration.

The controller knows nothing of the trainer's settings, and the interpreter that a job names may have another
version of it: whoever reads the configuration in the end is asked. Other programs cannot be.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from holdfast_trainer.contract import ENV_CONFIG, EXIT_CONFIG_ERROR

TRAIN = ("-m", "holdfast_trainer", "train")
STDIN = "/proc/self/fd/0"
ASKING_SECONDS = 5.0
"""It takes a fifth of one here. A client waits 10 s for its submission, and one that is not answered in time
is taken: the job says later what this would have said."""


def objections(
    command: Sequence[str],
    config: str,
    environment: Mapping[str, str],
    directory: str | None,
) -> tuple[str, ...]:
    """What the trainer says against `config`, a line each; none where it takes it, or nobody can tell."""
    python, *words = command
    if tuple(words[: len(TRAIN)]) != TRAIN:
        return ()
    asked = [python, *TRAIN[:-1], "check", *words[len(TRAIN) :]]
    try:
        answer = subprocess.run(
            asked,
            input=config,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**environment, ENV_CONFIG: STDIN},
            cwd=directory,
            timeout=ASKING_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ()
    if answer.returncode != EXIT_CONFIG_ERROR:
        return ()
    said = answer.stderr.partition("error: ")[2]
    # Lines are those of our own writing.
    return tuple(re.sub(rf"{STDIN}( line \d+)?", "spec.config", said).splitlines())
