"""`holdfast top`, `wait`, and what -w does: staying with jobs while they change.

All of it survives a restart of the controller, and an apiserver that blinks: jobs run on meanwhile, so
whoever waits for one goes on waiting, and says so once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from .connection import JobAddress, NamespaceOption, namespace_in_environment
from .exits import ERROR, JOB_FAILED, TIMED_OUT
from .selecting import Everywhere, Jobs, Selector, chosen, each

if TYPE_CHECKING:
    from ..client import Client
    from ..jobs import TrainingJob
    from .showing import Output, TableOutput

T = TypeVar("T")

POLL_SECONDS = 0.5
FRAME_SECONDS = 1.0


def add_to(cli: typer.Typer) -> None:
    cli.command("top")(top)
    cli.command("wait")(wait)


def top(
    ctx: typer.Context,
    namespace: NamespaceOption = None,
    everywhere: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="Jobs of all namespaces, as without -n.")
    ] = False,
    selector: Selector = "",
    once: Annotated[bool, typer.Option("--once", help="Show it once and leave.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, max=86400, help="Seconds between two looks.")
    ] = FRAME_SECONDS,
) -> None:
    """Watch all jobs live: steps, speed, attempts, goodput. Ctrl-C leaves.

    Where nothing can be drawn over, in a file or with TERM=dumb, it is shown once.
    """
    from .live import show_top
    from .tables import redraws

    with ctx.obj.client() as client:
        area = None if everywhere else namespace or namespace_in_environment()
        show_top(client, area, selector, interval, once or not redraws())


def wait(
    ctx: typer.Context,
    jobs: Jobs = None,
    namespace: NamespaceOption = None,
    everywhere: Everywhere = False,
    selector: Selector = "",
    phase: Annotated[str, typer.Option("--for", help="The phase, or `Final` for any end.")] = "Succeeded",
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds, for all together; then exit 4 (for ever).")
    ] = None,
) -> None:
    """Wait until a job is in a phase, or each of several.

    Exits 3 if one of them failed or ended otherwise, so that it never will be.

    Examples: holdfast wait gpt-1 gpt-2; holdfast wait -l sweep=7 --for Final
    """
    from ..jobs import Phase

    names = [*(known.value for known in Phase), "Final"]
    wanted = next((name for name in names if name.lower() == phase.lower()), None)
    if wanted is None:
        raise typer.BadParameter(f"--for {phase}: one of {', '.join(names)}")
    end = None if timeout is None else time.monotonic() + timeout
    with ctx.obj.client() as client:
        places = chosen(client, jobs, namespace, everywhere=everywhere, selector=selector)
        if not places:
            raise typer.Exit(ERROR)

        def one(place: JobAddress) -> None:
            found = None
            for found in looks(client, place, end):
                if _judged(place, found, wanted):
                    return
            state = f"is {found.status.phase.value}" if found is not None else "could not be asked for"
            typer.echo(f"error: {place} {state}, not {wanted}, after {timeout:g} s", err=True)
            raise typer.Exit(TIMED_OUT)

        raise typer.Exit(each(places, one))


def _judged(place: JobAddress, found: TrainingJob, wanted: str) -> bool:
    """Whether it is as wanted, which is told. Exits 3 where it never will be, or failed as it ended."""
    now, failed = found.status.phase, found.status.phase.value == "Failed"
    if now.value == wanted or (wanted == "Final" and now.final):
        typer.echo(f"{place} is {now.value}")
        if wanted == "Final" and failed:
            raise typer.Exit(JOB_FAILED)
        return True
    if now.final:
        why = f"{found.status.message}{_last_lines(place) if failed else ''}"
        typer.echo(f"error: {place} is {now.value} and will never be {wanted}: {why}", err=True)
        raise typer.Exit(JOB_FAILED)
    return False


def _last_lines(place: JobAddress) -> str:
    return f"; `holdfast describe {place}` has its last lines"


def looks(
    client: Client, place: JobAddress, end: float | None = None, *, seen: bool = False
) -> Iterator[TrainingJob]:
    """The job again and again, as `answers`. Raises NotFound where it is gone."""
    return answers(lambda: client.get(place.namespace, place.name), end, seen=seen)


def answers(ask: Callable[[], T], end: float | None = None, *, seen: bool = False) -> Iterator[T]:
    """What `ask` returns again and again, until `end` (monotonic seconds).

    The first time it raises Unavailable where no controller answers, unless one was `seen` before; later
    on the controller, or the apiserver behind it, is waited for.
    """
    from ..cluster import Unavailable

    told = False
    while True:
        pause = POLL_SECONDS
        try:
            yield ask()
            seen, told = True, False
        except Unavailable as error:
            if not seen:
                raise
            if not told:
                typer.echo(f"{error}; waiting for it", err=True)
            told = True
            pause = max(pause, error.retry_after)
        if end is not None and time.monotonic() >= end:
            return
        time.sleep(pause if end is None else max(0.0, min(pause, end - time.monotonic())))


def stay(client: Client, place: JobAddress) -> None:
    """Show a job that was submitted until it ends; exits 3 where it failed."""
    from ..jobs import Phase
    from .live import follow_job

    job = follow_job(looks(client, place, seen=True))
    if job.status.phase == Phase.FAILED:
        typer.echo(f"error: {place} failed: {job.status.message}{_last_lines(place)}", err=True)
        raise typer.Exit(JOB_FAILED)


def watch_jobs(client: Client, area: str | None, name: str | None, selector: str, output: Output) -> None:
    """`get -w`: a row, a name or a document for each change, until Ctrl-C. Raises NotFound for a job that is
    named and not there."""
    from ..cluster import Unavailable
    from .live import ChangeLines

    if area and name:
        client.get(area, name)
    lines = ChangeLines(output, namespaces=area is None)
    connected = False
    while True:
        pause = POLL_SECONDS
        try:
            for change in client.watch(area, selector=selector, name=name):
                connected = True
                lines.show(change)
            typer.echo("the controller ended the watch; connecting again", err=True)
        except Unavailable as error:
            if not connected:
                raise
            typer.echo(f"{error}; waiting for it", err=True)
            pause = max(pause, error.retry_after)
        connected = True
        time.sleep(pause)
        lines.only(_once_back(client, area, selector))


def watch_events(client: Client, place: JobAddress, output: TableOutput) -> None:
    """`events -w`: all there are, then each as it happens, until the job is gone or Ctrl-C."""
    from ..cluster import NotFound
    from .live import EventLines

    where = place.namespace, place.name
    lines, uid = EventLines(output), client.get(*where).metadata.uid
    try:
        # The job is asked for last: where it still is the same, so was the one whose events these are.
        for found, job in answers(lambda: (client.events(*where), client.get(*where)), seen=True):
            if job.metadata.uid != uid:
                break
            lines.show([{"job": str(place), **event} for event in found])
    except NotFound:
        pass
    typer.echo(f"{place} is gone", err=True)


def _once_back(client: Client, area: str | None, selector: str) -> list[TrainingJob]:
    from ..cluster import Unavailable

    while True:
        try:
            return client.list_jobs(area, selector=selector)
        except Unavailable as error:
            time.sleep(max(POLL_SECONDS, error.retry_after))
