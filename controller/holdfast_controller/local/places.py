"""Directories that jobs name, which may lie on a mount whose server is gone.

Whoever looks at such a one waits for ever, and a thread cannot be called back from there. So each look has a
thread of its own, and while one waits no other begins: the controller goes on, with all other jobs.
"""

from __future__ import annotations

import os
import threading

from holdfast_trainer.contract import legible

ANSWER_SECONDS = 1.0
_asked: dict[str, threading.Thread] = {}
"""Looks that have not come back."""


def why_not_entered(directory: str) -> str:
    """Why no job can start in it, in words; empty where jobs can."""
    answers: list[bool] = []

    def look() -> None:
        answers.append(os.path.isdir(directory) and os.access(directory, os.X_OK))

    if (before := _asked.get(directory)) is None or not before.is_alive():
        _asked[directory] = asking = threading.Thread(target=look, name="look", daemon=True)
        asking.start()
        asking.join(ANSWER_SECONDS)
    named = legible(directory)
    if not answers:
        return f"the directory {named} does not answer: see to its mount, or to the server of that"
    del _asked[directory]
    return "" if answers[0] else f"there is no directory {named} on this machine that jobs may enter"
