"""How the processes come to be that multiprocessing starts for a rank, such as a DataLoader's workers.

A forked one knows what a notice is, ends with its rank, and has the program's modules as they are. By the
other methods, of which Python 3.14 takes one where nobody chooses, a process imports the program anew, which
begins to train there unless it asks for its own name first. No torch here.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process


class ImportedAgain(RuntimeError):
    """The program is at its imports, in a process that is to load its data."""


def fork_unless_chosen() -> None:
    """Have multiprocessing fork, as it did on Linux before Python 3.14, unless the program has said how."""
    default, *_ = multiprocessing.get_all_start_methods()
    if default != "fork" and multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method("fork")


def require_no_worker() -> None:
    """Raises ImportedAgain where a process that multiprocessing starts imports the program."""
    # As multiprocessing itself knows it, when it refuses to start a process there.
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise ImportedAgain(
            "a process that multiprocessing has started, such as a DataLoader's worker, imports this program "
            "and came to Run(): it would train a second time. Put what the program does under `if __name__ "
            '== "__main__":`, or have its workers forked (multiprocessing_context="fork")'
        )
