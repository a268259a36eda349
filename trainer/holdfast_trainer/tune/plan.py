"""Which combinations are measured, and which one is chosen.

Each optimisation is measured alone, on top of everything off, and by leaving it out of everything on: what
something buys depends on what else is there. Pure: settings in, settings out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .settings import Settings

AS_IT_IS, ALL_OFF, ALL_ON, CHOSEN = "as it is", "all off", "all on", "chosen"
NOISE = 1.01
"""An optimisation is left out where the rest is so much faster without it."""


@dataclass(frozen=True)
class Switch:
    """One optimisation: a name, and what it sets."""

    name: str
    on: Mapping[str, object]
    off: Mapping[str, object]

    @property
    def does_anything(self) -> bool:
        return dict(self.on) != dict(self.off)


@dataclass(frozen=True)
class Candidate:
    """A row of the table."""

    name: str
    settings: Settings
    only_shown: bool = False
    """It is not to be chosen, however fast: more than speed hangs on it."""


@dataclass
class Measured:
    """What rounds found of one candidate, until one failed."""

    candidate: Candidate
    speeds: list[float] = field(default_factory=list)
    """Of all ranks, in the subject's unit a second, a round each."""
    memory: int = 0
    """Bytes of one rank at most."""
    fault: str = ""
    """Why the last round that was tried has no figure, and no other was."""

    @property
    def holds(self) -> bool:
        """Whether it was measured, and did not fail in a later round, as where memory is just enough once."""
        return bool(self.speeds) and not self.fault

    @property
    def speed(self) -> float:
        """The median; 0 where nothing could be measured."""
        return statistics.median(self.speeds) if self.speeds else 0.0


def candidates(configured: Settings, switches: Sequence[Switch]) -> list[Candidate]:
    """As it is, all off, each alone, each left out, all on; the first may be the same as another."""
    useful = [switch for switch in switches if switch.does_anything]
    off = _set(configured, useful, ())
    on = _set(configured, useful, [s.name for s in useful])
    rows = [Candidate(AS_IT_IS, configured), Candidate(ALL_OFF, off)]
    if len(useful) > 1:
        rows += [Candidate(switch.name, _set(configured, useful, [switch.name])) for switch in useful]
    rows.append(Candidate(ALL_ON, on))
    if len(useful) > 2:
        for switch in useful:
            rest = [s.name for s in useful if s is not switch]
            rows.append(Candidate(f"all on but {switch.name}", _set(configured, useful, rest)))
    return rows


def _set(settings: Settings, switches: Sequence[Switch], on: Sequence[str]) -> Settings:
    for switch in switches:
        settings = replace(settings, **(switch.on if switch.name in on else switch.off))  # type: ignore[arg-type]
    return settings


def choose(measured: Sequence[Measured]) -> Candidate:
    """What to use: everything that helps, judged by what its absence costs; never slower than as it is.

    Where leaving one out is faster than all on, it is left out. The row that was measured fastest wins over
    what follows from that, as combinations that nobody measured are a guess.
    """
    fitting = [row for row in measured if row.holds and not row.candidate.only_shown]
    if not fitting:
        raise ValueError("nothing was measured")
    by_name = {row.candidate.name: row for row in fitting}
    best = max(fitting, key=lambda row: row.speed)
    preferred = by_name.get(ALL_ON)
    if preferred is not None and preferred.speed * NOISE >= best.speed:
        best = preferred
    return replace(best.candidate, name=CHOSEN)


def factors(measured: Sequence[Measured]) -> dict[str, float]:
    """What each row buys: alone against all off, left out against all on, else against as it is."""
    by_name = {row.candidate.name: row.speed for row in measured if row.speeds}
    found = {}
    for name, speed in by_name.items():
        against = AS_IT_IS
        if name.startswith(f"{ALL_ON} but "):
            against = ALL_ON
        elif not name.startswith((AS_IT_IS, ALL_OFF, ALL_ON, CHOSEN)):  # recomputing or not: as the rest
            against = ALL_OFF
        if by_name.get(against):
            found[name] = speed / by_name[against]
    return found
