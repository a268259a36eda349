"""Checkpoints: exact, asynchronous, crash-consistent, verified on load, fenced.

`saver` stages, `writer` writes, `directory` commits and prunes, `loader` verifies and loads; `tree`,
`tensorfile`, `manifest`, `rng` and `cadence` are their parts. What is durable when: the step of a
`Saved` is on disk, with its manifest, its directory entry and all ranks' parts, before it is reported.
"""

from .cadence import Cadence
from .configuration import CONFIGURATION
from .directory import CheckpointDirectory, CheckpointError, Fenced
from .loader import Loaded, Skipped, WrongConfiguration, has_checkpoint, load_newest
from .saver import Saver
from .writer import Saved

__all__ = [
    "CONFIGURATION",
    "Cadence",
    "CheckpointDirectory",
    "CheckpointError",
    "Fenced",
    "Loaded",
    "Saved",
    "Saver",
    "Skipped",
    "WrongConfiguration",
    "has_checkpoint",
    "load_newest",
]
