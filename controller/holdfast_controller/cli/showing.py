"""`holdfast get`, `describe`, `events`, `ledger`, `logs`: what a job is and was."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .connection import (
    Job,
    JobAddress,
    NamespaceOption,
    complete_job,
    default_namespace,
    locate,
    not_empty,
)
from .selecting import Everywhere, Jobs, Phases, Selector, ago, each, known_phases, places_of

if TYPE_CHECKING:
    from ..client import Client
    from ..jobs import TrainingJob


class Output(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"


class TableOutput(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def add_to(cli: typer.Typer) -> None:
    cli.command("get")(get)
    cli.command("describe")(describe)
    cli.command("events")(events)
    cli.command("logs")(logs)
    cli.command("ledger")(ledger)


def get(
    ctx: typer.Context,
    jobs: Jobs = None,
    namespace: NamespaceOption = None,
    everywhere: Everywhere = False,
    selector: Selector = "",
    phases: Phases = None,
    output: Annotated[Output, typer.Option("-o", "--output")] = Output.TABLE,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Go on and show each change.")] = False,
) -> None:
    """Show jobs: by default all of the namespace.

    Examples: holdfast get -A --phase Failed; holdfast get gpt-1 gpt-2 -o yaml
    """
    if jobs and (everywhere or selector or phases):
        raise typer.BadParameter("a JOB cannot be given together with -A, -l or --phase")
    if watch and (phases or len(jobs or ()) > 1):
        raise typer.BadParameter("-w watches one JOB, or all with -l or -A, and takes no --phase")
    places = [locate(job, namespace) for job in jobs or ()]
    area = places[0].namespace if places else None if everywhere else namespace or default_namespace()
    wanted = known_phases(phases)
    with ctx.obj.client() as client:
        if watch:
            from .watching import watch_jobs

            watch_jobs(client, area, places[0].name if places else None, selector, output)
            return
        code, found = 0, list["TrainingJob"]()
        if places:
            code = each(places, lambda place: found.append(client.get(place.namespace, place.name)))
        else:
            found = client.list_jobs(area, phases=wanted, selector=selector)
    several = len({job.metadata.namespace for job in found}) > 1
    if found or not places:
        show_jobs(found, output, namespaces=everywhere or several, single=len(places) == 1)
    if not found and not places and output in (Output.TABLE, Output.WIDE):
        where = "in any namespace" if everywhere else f"in namespace {area}"
        typer.echo(f"no {'such jobs' if selector or phases else 'jobs'} {where}", err=True)
    raise typer.Exit(code)


def show_jobs(jobs: list[TrainingJob], output: Output, *, namespaces: bool, single: bool) -> None:
    """Print jobs in one of the formats; JSON and YAML of several are a TrainingJobList."""
    if output == Output.NAME:
        for job in jobs:
            typer.echo(job.key if namespaces else job.metadata.name)
    elif output in (Output.JSON, Output.YAML):
        from ..jobs import API_VERSION
        from .documents import print_document

        items = [job.to_dict() for job in jobs]
        every = {"apiVersion": API_VERSION, "kind": "TrainingJobList", "items": items}
        print_document(items[0] if single else every, output.value)
    elif jobs:
        from .tables import console, full_width, job_columns, show

        columns = job_columns(jobs, wide=output == Output.WIDE, namespaces=namespaces)
        screen = console()
        if output == Output.WIDE:
            # Who asks for everything gets it; a line too long for the terminal wraps there.
            screen.width = max(screen.width, full_width(columns))
        show(columns, screen)


def describe(ctx: typer.Context, job: Job, namespace: NamespaceOption = None) -> None:
    """Tell all about a job: where it stands, its attempts, what happened, how it last went wrong."""
    from .description import describe_job
    from .tables import console

    place = locate(job, namespace)
    with ctx.obj.client() as client:
        found = client.get(place.namespace, place.name)
        account = client.ledger(place.namespace, place.name)
        events = client.events(place.namespace, place.name)
    screen = console()
    screen.print(describe_job(found, account, events, screen.width))


def events(
    ctx: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="NAME or NAMESPACE/NAME; by default all.", autocompletion=complete_job
        ),
    ] = None,
    namespace: NamespaceOption = None,
    everywhere: Everywhere = False,
    selector: Selector = "",
    since: Annotated[
        str, typer.Option("--since", help="Only of the last 90s, 30m, 12h, 7d.", callback=not_empty)
    ] = "",
    output: Annotated[TableOutput, typer.Option("-o", "--output")] = TableOutput.TABLE,
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Go on showing what happens until the JOB is deleted.")
    ] = False,
) -> None:
    """Show what happened to a job, or to all, oldest first: starts, interruptions, lost work, failed saves.

    The newest 200 of a job are kept; on a cluster for as long as it keeps events, by default an hour.
    A (xN) behind a message tells that it came N times, and its time is that of the newest.

    Examples: holdfast events gpt -w; holdfast events -A --since 12h
    """
    if watch and (job is None or since):
        raise typer.BadParameter("-w shows all that happens to one JOB, from the first on")
    if job is not None and (everywhere or selector):
        raise typer.BadParameter("a JOB cannot be given together with -A or -l")
    earliest = ago(since) if since else datetime.min.replace(tzinfo=UTC)
    area = None if everywhere else namespace or default_namespace()
    with ctx.obj.client() as client:
        if job is not None and watch:
            from .watching import watch_events

            watch_events(client, locate(job, namespace), output)
            return
        places = [locate(job, namespace)] if job else places_of(client.list_jobs(area, selector=selector))
        found = [
            {"job": str(place), **event}
            for place in places
            for event in _events_of(client, place, gone_is_none=job is None)
            if datetime.fromisoformat(event["time"]) >= earliest
        ]
    found.sort(key=lambda event: datetime.fromisoformat(event["time"]))
    if output != TableOutput.TABLE:
        from .documents import print_document

        print_document({"items": found}, output.value)
        return
    if not found:
        all_of = f"namespace {area}" if area else "all namespaces"
        what = f"{places[0]} has" if job else f"the jobs of {all_of} have"
        typer.echo(f"{what} no events{f' of the newest {since}' if since else ''}", err=True)
        return
    from .tables import console, event_columns, show

    show(event_columns(found, jobs=job is None), console())


def _events_of(client: Client, place: JobAddress, *, gone_is_none: bool) -> list[dict[str, Any]]:
    from ..cluster import NotFound

    try:
        return client.events(place.namespace, place.name)
    except NotFound:
        if gone_is_none:
            return []
        raise


def ledger(
    ctx: typer.Context,
    job: Job,
    namespace: NamespaceOption = None,
    output: Annotated[TableOutput, typer.Option("-o", "--output")] = TableOutput.TABLE,
) -> None:
    """Account for every attempt: steps done, saved and lost, what the time to recover went into, the cost."""
    place = locate(job, namespace)
    with ctx.obj.client() as client:
        account = client.ledger(place.namespace, place.name)
    if output != TableOutput.TABLE:
        from .documents import print_document

        print_document(account, output.value)
        return
    if not account["attempts"]:
        typer.echo(f"{place} has had no attempt yet", err=True)
        return
    from .description import totals_line
    from .starts import start_columns
    from .tables import console, ledger_columns, table

    screen = console()
    screen.print(table(ledger_columns(account["attempts"]), screen.width))
    screen.print()
    screen.print(table(start_columns(account["attempts"]), screen.width))
    screen.print()
    screen.print(totals_line(account["totals"]), soft_wrap=True)


def logs(
    ctx: typer.Context,
    job: Job,
    namespace: NamespaceOption = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on through all attempts until the job ends.")
    ] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only of this attempt (the newest).")] = None,
    rank: Annotated[int, typer.Option(min=0, help="The output of this rank.")] = 0,
    tail: Annotated[int | None, typer.Option(min=0, help="Only so many of the last lines.")] = None,
) -> None:
    """Show the output of a rank."""
    place = locate(job, namespace)
    with ctx.obj.client() as client:
        where = place.namespace, place.name
        lines = client.logs(*where, attempt=attempt, rank=rank, tail=tail)
        if follow:
            from .following import Followed

            lines = Followed(client, place, rank, attempt, tail).lines()
        shown = False
        for line in lines:
            shown = True
            typer.echo(line)
        if not (shown or follow or tail == 0):
            newest = client.get(*where).status.attempt
            typer.echo(_silent(place, rank, attempt or newest, newest), err=True)


def _silent(place: JobAddress, rank: int, attempt: int, newest: int) -> str:
    """Why nothing was shown: an attempt that has just begun has written nothing yet."""
    told = f"nothing is there of rank {rank} of attempt {attempt} of {place}"
    if attempt < newest or attempt < 2:
        return told
    return f"{told}; `holdfast logs {place} --attempt {attempt - 1}` shows what was before"
