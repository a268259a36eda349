"""`holdfast suspend`, `resume`, `delete`: what changes jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from .connection import JobAddress, NamespaceOption
from .exits import TIMED_OUT
from .selecting import Everywhere, FinishedFor, Jobs, Phases, Selector, chosen, each
from .watching import looks

if TYPE_CHECKING:
    from ..client import Client


def add_to(cli: typer.Typer) -> None:
    cli.command("suspend")(suspend)
    cli.command("resume")(resume)
    cli.command("delete")(delete)


def suspend(
    ctx: typer.Context,
    jobs: Jobs = None,
    namespace: NamespaceOption = None,
    everywhere: Everywhere = False,
    selector: Selector = "",
) -> None:
    """Stop jobs after a checkpoint and keep everything.

    Examples: holdfast suspend gpt; holdfast suspend -l team=vision
    """
    with ctx.obj.client() as client:

        def one(place: JobAddress) -> None:
            found = client.suspend(place.namespace, place.name)
            state = "is" if found.status.phase == "Suspended" else "is being"
            typer.echo(f"{place} {state} suspended; `holdfast resume {place}` lets it go on")

        places = chosen(client, jobs, namespace, everywhere=everywhere, selector=selector)
        raise typer.Exit(each(places, one))


def resume(
    ctx: typer.Context,
    jobs: Jobs = None,
    namespace: NamespaceOption = None,
    everywhere: Everywhere = False,
    selector: Selector = "",
) -> None:
    """Let suspended jobs go on from their last checkpoint."""
    with ctx.obj.client() as client:

        def one(place: JobAddress) -> None:
            client.resume(place.namespace, place.name)
            typer.echo(f"{place} goes on")

        places = chosen(client, jobs, namespace, everywhere=everywhere, selector=selector)
        raise typer.Exit(each(places, one))


def delete(
    ctx: typer.Context,
    jobs: Jobs = None,
    namespace: NamespaceOption = None,
    everywhere: Everywhere = False,
    selector: Selector = "",
    phases: Phases = None,
    finished_for: FinishedFor = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Name them, and delete nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until they are gone.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait; then exit 4.")] = 120.0,
) -> None:
    """Delete jobs. On one machine their run directories go with them: checkpoints, logs, ledger.

    On Kubernetes these lie on a PersistentVolumeClaim, and stay there until somebody removes them.

    Examples: holdfast delete gpt-1 gpt-2; holdfast delete --finished-for 30d -l team=vision --dry-run
    """
    asked: dict[JobAddress, str] = {}
    with ctx.obj.client() as client:

        def ask(place: JobAddress) -> None:
            if dry_run:
                client.get(place.namespace, place.name)
                typer.echo(f"{place} would be deleted")
                return
            job = client.delete(place.namespace, place.name)
            asked[place] = job.metadata.uid
            kept = "; what it wrote on a claim stays there" if job.spec.storage else ""
            typer.echo(f"{place} is being deleted{kept}")

        places = chosen(
            client,
            jobs,
            namespace,
            everywhere=everywhere,
            selector=selector,
            phases=phases,
            finished_for=finished_for,
        )
        code = each(places, ask)
        end = time.monotonic() + timeout

        def see_gone(place: JobAddress) -> None:
            if not _is_gone(client, place, asked[place], end):
                typer.echo(f"error: {place} is not gone after {timeout:g} s", err=True)
                raise typer.Exit(TIMED_OUT)
            typer.echo(f"{place} is gone")

        gone = each(list(asked), see_gone) if wait else 0
        raise typer.Exit(code or gone)


def _is_gone(client: Client, place: JobAddress, uid: str, end: float) -> bool:
    """Whether it is by `end` (monotonic seconds)."""
    from ..cluster import NotFound

    try:
        # A new job may take the name at once; it is not the one waited for.
        return any(found.metadata.uid != uid for found in looks(client, place, end, seen=True))
    except NotFound:
        return True
