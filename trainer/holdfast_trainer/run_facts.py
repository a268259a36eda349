"""What any run meets, be it of the reference GPT or of a model of one's own: the disk that its checkpoints
go to, what lies between its ranks, and how long it takes. Pure: facts in, words and seconds out.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checkpoint.cadence import does_not_fit
from .links import Link, judged
from .sizes import size_text
from .verdict import QUEUED_SHARE


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Measured before a run (see `probing.surroundings`). Sizes in bytes, times in seconds."""

    start_seconds: float
    """From the start of the process to the first step, with what the first step takes more than others."""
    disk_bytes_per_second: float
    state_bytes: int
    """Of a checkpoint."""
    notice_seconds: float
    reduce_bytes_per_second: float | None = None
    """Bus bandwidth of an all-reduce between the ranks; None where there is one."""
    link: Link | None = None
    """What lies between them, and what it is rated for."""
    queued: float | None = None
    """Share of what rank 0 computed in the measured steps, or would have, for which it had no core; None
    where the kernel does not tell."""

    @property
    def save_seconds(self) -> float:
        return self.state_bytes / self.disk_bytes_per_second

    def seconds_of(self, steps: int, step_seconds: float) -> float:
        """From start to end of the process: start-up, steps, and the save at the end."""
        return self.start_seconds + steps * step_seconds + self.save_seconds

    def outlasts_notice(self) -> str | None:
        """What to tell where a save takes longer than a notice leaves; None where it fits."""
        return does_not_fit(self.save_seconds, self.notice_seconds)

    def slow_network(self) -> tuple[str, str] | None:
        """(what to set, why) where ranks reduce far slower than their link is rated for."""
        if self.link is None or self.reduce_bytes_per_second is None:
            return None
        return judged(self.reduce_bytes_per_second, self.link)

    def short_of_cores(self) -> str | None:
        """What to tell where the measured times are not those of a run that has its cores."""
        if self.queued is None or self.queued < QUEUED_SHARE:
            return None
        return (
            f"these steps waited for a core for {self.queued:.0%} of the time that they would have computed, "
            "so the times above are long: let less run beside it, or give it more cores, and measure again"
        )


def checkpoint_line(facts: RunFacts) -> str:
    return (
        f"checkpoint  {size_text(facts.state_bytes)}, {facts.save_seconds:.1f} s at "
        f"{size_text(facts.disk_bytes_per_second)}/s; a notice leaves {facts.notice_seconds:.0f} s"
    )


def network_lines(facts: RunFacts) -> list[str]:
    """None of one rank."""
    if facts.reduce_bytes_per_second is None:
        return []
    speed = f"{size_text(facts.reduce_bytes_per_second)}/s all-reduce bus bandwidth"
    return [f"network     {speed} over {_rated(facts.link)}"]


def time_line(seconds: float, steps: int) -> str:
    return f"time        {_duration(seconds)} for {steps:,} steps"


def _rated(link: Link | None) -> str:
    if link is None:
        return "what is between the ranks"
    rate = link.bytes_per_second
    return f"{link.name}, {'which has no rated speed' if rate is None else f'rated for {size_text(rate)}/s'}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"
