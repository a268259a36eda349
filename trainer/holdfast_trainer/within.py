"""Ask what may never answer, such as a mount whose server is gone, and wait no longer than so long.

A call that waits for such a mount cannot be broken off. So it is made in a thread of its own, which is left
to itself where it takes too long. Standard library only, because a rank waits for supervise.py to start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


def within(seconds: float, ask: Callable[[], object]) -> Exception | None:
    """Call `ask`, and wait for its end that long. Returns what it raised, or TimeoutError."""
    raised: list[Exception] = []

    def answer() -> None:
        try:
            ask()
        except Exception as error:
            raised.append(error)

    thread = start_thread(answer, "within")
    if thread is None:
        answer()
    else:
        thread.join(seconds)
        if thread.is_alive():
            return TimeoutError(f"no answer within {seconds:.1f} s")
    return raised[0] if raised else None


def start_thread(work: Callable[[], object], name: str) -> threading.Thread | None:
    """A running daemon thread; None where none can be started, as when the interpreter is ending."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
