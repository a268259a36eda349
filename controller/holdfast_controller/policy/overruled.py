"""What a job tells the trainer that comes with Holdfast of its checkpoints, and is not heeded. Pure.

`spec.checkpoint` stands in the environment of every job, its defaults too, and wins over the trainer's own
`checkpoint.every` and `checkpoint.keep`: a configuration that was trained with by hand may have these.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast_controller.jobs import Spec

TRAINER = "holdfast_trainer"


def overruled_notes(spec: Spec) -> tuple[str, ...]:
    """A sentence for each; () where the program is another one, whose config may mean anything."""
    if TRAINER not in spec.command:
        return ()
    section = spec.config.get("checkpoint")
    wins = {"every": spec.checkpoint.every, "keep": str(spec.checkpoint.keep)}
    notes = []
    for key, winning in wins.items():
        place, told = f"spec.config.checkpoint.{key}", None
        if isinstance(section, Mapping):
            told = section.get(key)
        for word in spec.command:
            if word.startswith(f"checkpoint.{key}="):
                place, told = f"checkpoint.{key} in spec.command", word.partition("=")[2]
        if told is not None and str(told) != winning:
            notes.append(
                f"{place} is {told!s:.40}, and has no effect: spec.checkpoint.{key}, which is {winning}, "
                "wins; say there what is meant"
            )
    return tuple(notes)
