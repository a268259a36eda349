"""Which lines are a rank's, which last lines of ranks stay in a job's status, and which tell most.

Ranks of one replica share its output, in which each line has its rank's mark (contract.rank_mark); what has
none is torchrun's, and told with the replica's first rank.

An apiserver takes no object above 1.5 MiB, and the job's own configuration may be a third of that: a status
that outgrew it could not be written any more, and the job would stand still. So the newest attempts keep
theirs; of older ones the whole logs are in the run directory.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from holdfast_controller.jobs import AttemptRecord

TAIL_BYTES = 128 * 1024
"""Of all attempts together, as they are written: four gangs of eight ranks with plain text."""


C_STACK_LINES = 40
"""So many at most does Python 3.14 write of a C stack, of which it tells 32 calls."""

_MARK = re.compile(r"\[rank ([0-9]{1,6})\] ")
_NAMED = re.compile(r"\brank ([0-9]{1,6})\b")
_REPLICA = re.compile(r"replica ([0-9]{1,6}): ")
"""As reasons begin (classify.py)."""
_C_STACK = re.compile(
    r"(?:\[rank \d+\] )?(?:Current thread's C stack trace \(|  Binary file \".*\[0x[0-9a-f]+\]$|"
    r"  <(?:truncated rest of calls|cannot get C stack on this system)>)"
)


def rank_of(line: str, first: int) -> int:
    """Whose line it is in the output of a replica whose ranks begin with `first`."""
    mark = _MARK.match(line)
    return int(mark[1]) if mark else first


def end_of(line: str, characters: int) -> str:
    """Its last ones, behind the mark of its rank, which is not counted."""
    if len(line) <= characters:
        return line
    mark = _MARK.match(line)
    return (mark[0] if mark else "") + line[-characters:]


def last_told(lines: Sequence[str], count: int) -> list[str]:
    """The last `count` lines, without a C stack. Python 3.14 writes that of a process which crashes, or is
    ended as it hangs, below its own, which says more, and would be pushed out by it; the whole log has it."""
    return [line for line in lines if not _C_STACK.match(line)][-count:]


def last_of_each(lines: Iterable[str], first: int, count: int, characters: int) -> list[str]:
    """The last `count` lines of each rank, as far as its last `characters` go, in the order of all."""
    kept: defaultdict[int, list[int]] = defaultdict(list)
    left: defaultdict[int, int] = defaultdict(lambda: characters)
    said = list(lines)
    for number in range(len(said) - 1, -1, -1):
        rank = rank_of(said[number], first)
        if len(kept[rank]) == count or left[rank] <= 0:
            continue
        said[number] = end_of(said[number], left[rank])
        left[rank] -= len(said[number]) + 1
        kept[rank].append(number)
    return [said[number] for number in sorted(number for numbers in kept.values() for number in numbers)]


def most_telling(record: AttemptRecord, ranks_a_replica: int) -> str | None:
    """Of the ranks whose last lines are kept the one that the reason is about: which it names, else which
    wrote its words, in the replica that it names, else that replica's first. None where no lines are kept."""
    ranks = sorted(record.log_tail, key=int)
    named, replica = _NAMED.search(record.reason), _REPLICA.match(record.reason)
    if named is not None and named[1] in record.log_tail:
        return named[1]
    of_it = [r for r in ranks if replica is not None and int(r) // ranks_a_replica == int(replica[1])]
    words = record.reason[replica.end() :].partition(" ... ")[0] if replica is not None else ""
    wrote = [rank for rank in of_it if words in record.log_tail[rank]]
    return next(iter([*wrote, *of_it, *ranks]), None)


def bound_tails(attempts: Sequence[AttemptRecord], limit: int = TAIL_BYTES) -> None:
    """Leave out, in place, what does not fit: the oldest attempts first, and of one its last ranks."""
    left = limit
    for record in reversed(attempts):
        kept = {}
        for rank, text in record.log_tail.items():
            left -= len(json.dumps(text, ensure_ascii=False).encode())
            if left < 0:
                break
            kept[rank] = text
        record.log_tail = kept
