"""Commands that start ranks of their own: a job's command is started once for each rank as it is, so each of
those would start ranks once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from pathlib import PurePath

from holdfast_controller.jobs import Spec

_PROGRAMS = ("torchrun", "deepspeed")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def launcher_of(command: Sequence[str]) -> str | None:
    """The words of the command that start ranks, None where none do."""
    program, *words = command
    name = PurePath(program).name
    if name in _PROGRAMS:
        return name
    if name == "accelerate" and words[:1] == ["launch"]:
        return "accelerate launch"
    if name.startswith("python"):
        match list(dropwhile(lambda word: word.startswith("-") and word != "-m", words)):
            case ["-m", module, *_] if module in _MODULES:
                return f"{name} -m {module}"
    return None


def launcher_notes(spec: Spec) -> tuple[str, ...]:
    """What somebody who names one must know; () where the command names none."""
    launcher = launcher_of(spec.command)
    if launcher is None:
        return ()
    return (
        f"spec.command names {launcher}, which starts ranks of its own, while Holdfast's torchrun starts the "
        f"command once for each of the job's ranks ({spec.world_size}): name the program alone, as in "
        "[python, train.py], and set spec.replicas and spec.processes",
    )
