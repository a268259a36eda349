"""How long a thread of PyTorch's OpenMP spins before it sleeps, while it waits for the others.

GNU's library spins for over 10 ms, longer than a turn on a core: where anything else runs on the machine, the
thread that is waited for has no core, and the one that waits burns its own. Half a millisecond is enough for
nearly all that comes between two parallel loops of a step: where cores are free it costs nothing that could
be measured, or 3 % of a step where AMX makes the loops short; a tenth of it costs more (`make bench-trainer
ARGS="--stages 'same dtype' 'busy machine'"`). It is read once, when the library is loaded: it must be set
before PyTorch is imported. Standard library only.
"""

from __future__ import annotations

from collections.abc import MutableMapping

NAME = "GOMP_SPINCOUNT"
SPINS = "10000"
POLICY = "OMP_WAIT_POLICY"


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Set it there, unless the user has said how threads are to wait."""
    if not environment.keys() & {NAME, POLICY}:
        environment[NAME] = SPINS
