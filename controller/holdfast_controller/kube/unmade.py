"""Why an operator does not make an attempt's pods, or the name by which they meet: Events say, the attempt
object's status does not.

A quota that has no room, a LimitRange, an admission webhook: the apiserver refuses a pod, and whoever asked
for it tells that in an Event of what it makes them for, and asks again. That is the attempt object itself, or
an object further down that the kind knows by name alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast_controller.manifests import kind_of
from holdfast_controller.policy.waits import FAILED_POD, FAILED_SERVICE, explain_wait

from .connection import Connection, Document
from .events import EventLog
from .inquiry import Inquiry
from .observation import is_suspended
from .pieces import Pieces
from .reflector import uid_of

FIRST_SECONDS = 5.0
BEHIND_BY, BEHIND_SECONDS = 10, 2.0


def unmade(
    connection: Connection, pieces: Pieces, clock: Callable[[], float] = time.monotonic
) -> Inquiry[str]:
    """About attempt objects that may still have pods to be made."""
    return Inquiry(
        connection,
        pieces,
        lambda pieces: pieces.objects.values(),
        concerns=_is_in_the_making,
        ask=_why,
        first_seconds=FIRST_SECONDS,
        clock=clock,
    )


def is_behind(asked: Inquiry[str], pieces: Pieces) -> bool:
    """Whether an operator has more to do than it can at once: of the attempts that it should have seen, the
    last few have no pods, and nobody says why. `asked` is of `unmade`."""
    newest = asked.newest(BEHIND_BY, BEHIND_SECONDS)
    told = any(uid_of(one) in asked.known or pieces.has_pods(one) for one in newest)
    return len(newest) == BEHIND_BY and not told


def _is_in_the_making(attempt_object: Document) -> bool:
    made = kind_of(attempt_object).has_made(attempt_object.get("status") or {})
    return not is_suspended(attempt_object) and not made


async def _why(connection: Connection, attempt_object: Document) -> str | None:
    kind, meta = kind_of(attempt_object), attempt_object["metadata"]
    whose = kind.maker(meta["name"])
    told = await EventLog(connection).of_named(meta["namespace"], *whose, since=meta["creationTimestamp"])
    first = kind.address(meta["name"])  # they meet at replica 0, and need no other's name
    for event in reversed(told):
        if event.reason == kind.refused:
            return explain_wait(f"{FAILED_POD}{event.message.removeprefix('Error creating: ')}")
        if event.reason == kind.nameless and f'"{first}"' in event.message:
            return explain_wait(f"{FAILED_SERVICE}{event.message.removeprefix('Error creating: ')}")
    return None
