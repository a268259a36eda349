"""Ask what may never answer, such as a mount whose server is gone, and wait no longer than so long.

A call that waits for such a mount cannot be broken off. So it is made in a thread of its own, which is left
to itself where it takes too long.
"""

from __future__ import annotations

from collections.abc import Callable

from .checkpoint.spread import start_thread


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
