"""What `run.steps` returns: an iterable, of which each `for` has a loop of its own.

A generator is left by `break` once nobody holds it. Who shows progress keeps what is gone through in a
variable, as `bar = tqdm(run.steps(1000))`: that it was left would be known at the program's end alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator


class StepsLeft:
    """The steps that are left when a loop over them begins."""

    def __init__(self, loop: Callable[[], Generator[int]]) -> None:
        self._loop = loop
        self._by_hand: Generator[int] | None = None
        """For who asks by `next`, which does not say when that ends."""

    def __iter__(self) -> Iterator[int]:
        return self._loop() if self._by_hand is None else self._by_hand

    def __next__(self) -> int:
        if self._by_hand is None:
            self._by_hand = self._loop()
        return next(self._by_hand)

    def close(self) -> None:
        """Leave the loop that `next` began, if any."""
        if self._by_hand is not None:
            self._by_hand.close()
            self._by_hand = None
