"""A program that is over while a thread of it goes on: Python waits for that one, for ever where it never
ends, and so does the job.

Nothing else says so. What is left to be done comes after the threads: the last save, where the loop was left
by `break`, and that the rank has finished. The thread is not ended: it may upload what the program has made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from functools import cache

from .watchdog import standing_of
from .within import start_thread

log = logging.getLogger("holdfast")

PATIENCE_SECONDS = 30.0
"""How long the program may have been over before anything is said."""


@cache
def tell_of_lingering() -> None:
    """Once this program is over, say which of its threads keep the process. Once for a process."""
    start_thread(_watch, "lingering")


def _watch() -> None:
    threading.main_thread().join()
    time.sleep(PATIENCE_SECONDS)
    if said := lingering(threading.enumerate()):
        log.warning("%s", said)


def lingering(threads: Iterable[threading.Thread]) -> str:
    """Whom of these the process waits for, in a sentence; empty where there are none."""
    kept_by = [one for one in threads if not one.daemon and one is not threading.main_thread()]
    if not kept_by:
        return ""
    told = ", ".join(f"{one.name} (at {standing_of(one)})" for one in kept_by)
    return (
        f"the program is over, and Python waits for threads of it that are not: {told}. This process ends, "
        "and with it the job, when these do. End them in the program, or start them with daemon=True."
    )
