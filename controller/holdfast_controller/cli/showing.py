"""`holdfast get`, `describe`, `events`, `ledger`, `logs`: what a job is and was."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from .connection import Job, NamespaceOption, complete_job, locate

if TYPE_CHECKING:
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
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="By default all jobs.", autocompletion=complete_job),
    ] = None,
    namespace: NamespaceOption = None,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Of all namespaces.")] = False,
    selector: Annotated[str, typer.Option("-l", "--selector", help="Only jobs with labels: a=b,c!=d.")] = "",
    output: Annotated[Output, typer.Option("-o", "--output")] = Output.TABLE,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Go on showing changes.")] = False,
) -> None:
    """Show jobs."""
    if job is not None and (everywhere or selector):
        raise typer.BadParameter("a JOB cannot be given together with -A or -l")
    place = locate(job, namespace) if job is not None else None
    area = place.namespace if place else None if everywhere else namespace or "default"
    with ctx.obj.client() as client:
        if watch:
            from .watching import watch_jobs

            watch_jobs(client, area, place.name if place else None, selector, output)
            return
        found = (
            [client.get(place.namespace, place.name)] if place else client.list_jobs(area, selector=selector)
        )
    show_jobs(found, output, namespaces=everywhere, single=place is not None)
    if not found and output in (Output.TABLE, Output.WIDE):
        where = "in any namespace" if everywhere else f"in namespace {area}"
        typer.echo(f"no jobs {where}", err=True)


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
        from .tables import console, full_width, job_columns, table

        columns = job_columns(jobs, wide=output == Output.WIDE, namespaces=namespaces)
        screen = console()
        if output == Output.WIDE:
            # Who asks for everything gets it; a line too long for the terminal wraps there.
            screen.width = max(screen.width, full_width(columns))
        screen.print(table(columns, screen.width))


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
    job: Job,
    namespace: NamespaceOption = None,
    output: Annotated[TableOutput, typer.Option("-o", "--output")] = TableOutput.TABLE,
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Go on showing what happens until the job is deleted.")
    ] = False,
) -> None:
    """Show what happened to a job, oldest first: starts, interruptions, lost work, failed saves.

    The newest 200 are kept; on a cluster for as long as it keeps events, by default an hour.
    A (xN) behind a message tells that it came N times.
    """
    place = locate(job, namespace)
    with ctx.obj.client() as client:
        if watch:
            from .watching import watch_events

            watch_events(client, place, output)
            return
        found = client.events(place.namespace, place.name)
    if output != TableOutput.TABLE:
        from .documents import print_document

        print_document({"items": found}, output.value)
        return
    if not found:
        typer.echo(f"{place} has no events", err=True)
        return
    from .tables import console, event_columns, table

    screen = console()
    screen.print(table(event_columns(found), screen.width))


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
    attempt: Annotated[int | None, typer.Option(min=1, help="Of this attempt alone (the newest).")] = None,
    rank: Annotated[int, typer.Option(min=0, help="Of this rank.")] = 0,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last lines.")] = None,
) -> None:
    """Show the output of a rank."""
    place = locate(job, namespace)
    with ctx.obj.client() as client:
        where = place.namespace, place.name
        lines = client.logs(*where, attempt=attempt, rank=rank, tail=tail)
        if follow:
            from .following import Followed

            lines = Followed(client, place, rank, attempt, tail).lines()
        for line in lines:
            typer.echo(line)
