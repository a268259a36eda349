"""Which jobs a command means that takes several, and doing it to each of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from .connection import JobAddress, complete_job, default_namespace, locate, not_empty
from .exits import ERROR, JOB_FAILED, TIMED_OUT

if TYPE_CHECKING:
    from ..client import Client
    from ..jobs import TrainingJob

Jobs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB", help="One or several: NAME or NAMESPACE/NAME.", autocompletion=complete_job
    ),
]
Everywhere = Annotated[bool, typer.Option("-A", "--all-namespaces", help="Jobs of all namespaces.")]
Selector = Annotated[
    str,
    typer.Option("-l", "--selector", help="Only jobs with labels: a=b,c!=d.", callback=not_empty),
]
Phases = Annotated[
    list[str] | None, typer.Option("--phase", help="Only jobs in this phase; may be repeated.")
]
FinishedFor = Annotated[
    str,
    typer.Option(
        "--finished-for",
        help="Only jobs that ended so long ago or longer: 90s, 30m, 12h, 7d.",
        callback=not_empty,
    ),
]

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def chosen(
    client: Client,
    jobs: Sequence[str] | None,
    namespace: str | None,
    *,
    everywhere: bool = False,
    selector: str = "",
    phases: Sequence[str] | None = None,
    finished_for: str = "",
) -> list[JobAddress]:
    """Those that are named, or all that fit what was given instead; that there are none is told."""
    narrowed = bool(selector or phases or finished_for)
    if jobs:
        if narrowed or everywhere:
            raise typer.BadParameter("a JOB cannot be given together with what selects several")
        return [locate(job, namespace) for job in jobs]
    if not narrowed:
        raise typer.BadParameter("name one or several jobs, or select them, as with -l team=vision")
    area = None if everywhere else namespace or default_namespace()
    found = client.list_jobs(area, phases=known_phases(phases), selector=selector)
    if finished_for:
        since = ago(finished_for)
        found = [job for job in found if (ended := job.status.finished_at) is not None and ended <= since]
    if not found:
        where = f"in namespace {area}" if area else "in any namespace"
        typer.echo(f"no such jobs {where}", err=True)
    return places_of(found)


def places_of(jobs: Sequence[TrainingJob]) -> list[JobAddress]:
    return [JobAddress(job.metadata.namespace, job.metadata.name) for job in jobs]


def known_phases(given: Sequence[str] | None) -> tuple[str, ...]:
    """As the server writes them. Raises BadParameter."""
    from ..jobs import Phase

    known = {phase.value.lower(): phase.value for phase in Phase}
    for name in given or ():
        if name.lower() not in known:
            raise typer.BadParameter(f"--phase {name}: one of {', '.join(known.values())}")
    return tuple(known[name.lower()] for name in given or ())


def ago(text: str) -> datetime:
    """When `90s`, `30m`, `12h`, `7d` before now was; at the beginning of all times at most. Raises
    BadParameter."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time; write it as 90s, 30m, 12h or 7d")
    try:
        return datetime.now(UTC) - timedelta(**{UNITS[match[2]]: int(match[1])})
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC)


def each(places: Sequence[JobAddress], act: Callable[[JobAddress], object]) -> int:
    """Do it to every one. What is wrong with one of them is told, and keeps no other from it. Returns the
    gravest of their exit codes."""
    from ..cluster import HoldfastError, Unavailable

    codes = set[int]()
    for place in places:
        try:
            act(place)
        except typer.Exit as ended:
            codes.add(ended.exit_code)
        except Unavailable:
            raise
        except HoldfastError as error:
            typer.echo(f"error: {error}", err=True)
            codes.add(ERROR)
    return next((code for code in (ERROR, JOB_FAILED, TIMED_OUT) if code in codes), 0)
