"""What somebody must know of a job that is taken as it stands: for its plan, and for events. Pure."""

from __future__ import annotations

from holdfast_controller.jobs import Spec

from .launchers import launcher_notes
from .overruled import overruled_notes


def spec_notes(spec: Spec) -> tuple[tuple[str, str], ...]:
    """The reason of an event and a sentence, each."""
    return (
        *(("NestedLauncher", note) for note in launcher_notes(spec)),
        *(("SettingOverruled", note) for note in overruled_notes(spec)),
    )
