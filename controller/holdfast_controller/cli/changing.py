"""`holdfast suspend`, `resume`, `delete`: what changes a job."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .connection import Job, NamespaceOption, locate
from .exits import ERROR, TIMED_OUT
from .watching import looks


def add_to(cli: typer.Typer) -> None:
    cli.command("suspend")(suspend)
    cli.command("resume")(resume)
    cli.command("delete")(delete)


def suspend(ctx: typer.Context, job: Job, namespace: NamespaceOption = None) -> None:
    """Stop a job after a checkpoint and keep everything."""
    place = locate(job, namespace)
    with ctx.obj.client() as client:
        found = client.suspend(place.namespace, place.name)
    state = "is" if found.status.phase == "Suspended" else "is being"
    typer.echo(f"{place} {state} suspended; `holdfast resume {job}` lets it go on")


def resume(ctx: typer.Context, job: Job, namespace: NamespaceOption = None) -> None:
    """Let a suspended job go on from its last checkpoint."""
    place = locate(job, namespace)
    with ctx.obj.client() as client:
        client.resume(place.namespace, place.name)
    typer.echo(f"{place} goes on")


def delete(
    ctx: typer.Context,
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="One or several.")],
    namespace: NamespaceOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until it is gone.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait; then exit 4.")] = 120.0,
) -> None:
    """Delete jobs. On one machine their run directories go with them: checkpoints, logs, ledger.

    On Kubernetes these lie on a PersistentVolumeClaim, and stay there until somebody removes them.
    """
    from ..cluster import NotFound

    with ctx.obj.client() as client:
        asked, absent = [], False
        for place in [locate(job, namespace) for job in jobs]:
            try:
                job = client.delete(place.namespace, place.name)
            except NotFound as error:  # it is gone, as was asked; the others are not
                typer.echo(f"error: {error}", err=True)
                absent = True
                continue
            asked.append((place, job.metadata.uid))
            kept = "; what it wrote on a claim stays there" if job.spec.storage else ""
            typer.echo(f"{place} is being deleted{kept}")
        end = time.monotonic() + timeout
        for place, uid in asked if wait else []:
            try:
                for found in looks(client, place, end, seen=True):
                    # A new job may take the name at once; it is not the one waited for.
                    if found.metadata.uid != uid:
                        break
                else:
                    typer.echo(f"error: {place} is not gone after {timeout:g} s", err=True)
                    raise typer.Exit(TIMED_OUT)
            except NotFound:
                pass
            typer.echo(f"{place} is gone")
    if absent:
        raise typer.Exit(ERROR)
