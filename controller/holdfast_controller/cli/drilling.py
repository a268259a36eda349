"""`holdfast drill`: disrupt a job on purpose, and see what it cost."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..drills import KINDS, DrillKind, DrillReport, drill_report
from .connection import Job, JobAddress, NamespaceOption, locate
from .documents import TextOutput, camel, print_document
from .exits import TIMED_OUT
from .watching import answers

if TYPE_CHECKING:
    from ..client import Client

DONE = {
    DrillKind.KILL: "killed",
    DrillKind.NOTICE: "given notice",
    DrillKind.EVICT: "evicted",
    DrillKind.NODE: "evicted with its node, which stays cordoned: `kubectl uncordon` it in the end",
    DrillKind.FREEZE: "frozen: its peers notice after the job's hangSeconds",
    DrillKind.OOM: "driven into its memory limit",
}


def add_to(cli: typer.Typer) -> None:
    cli.command("drill")(drill)


def drill(
    ctx: typer.Context,
    job: Job,
    namespace: NamespaceOption = None,
    replica: Annotated[int | None, typer.Option(min=0, help="Which one (a random one).")] = None,
    kind: Annotated[DrillKind, typer.Option(help=KINDS)] = DrillKind.KILL,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it trains again, and report.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait; then exit 4.")] = 900.0,
    output: Annotated[
        TextOutput, typer.Option("-o", "--output", help="Format of what is told on stdout.")
    ] = TextOutput.TEXT,
) -> None:
    """Disrupt a replica, to see the job survive it; with --wait also what that cost, and the proof."""
    place = locate(job, namespace)
    with ctx.obj.client() as client:
        done = client.drill(place.namespace, place.name, replica, kind.value)
        told = f"{place}: replica {done['replica']} of attempt {done['attempt']} {DONE[kind]}"
        typer.echo(told, err=output is not TextOutput.TEXT)
        if not wait:
            if output is not TextOutput.TEXT:
                print_document(done, output.value)
            return
        report = _wait(client, place, int(done["attempt"]), timeout)
    if output is TextOutput.TEXT:
        typer.echo(_text(report))
    else:
        print_document(_document(report), output.value)
    if report.different:
        raise typer.Exit(1)


def _wait(client: Client, place: JobAddress, attempt: int, timeout: float) -> DrillReport:
    end = time.monotonic() + timeout
    for account in answers(lambda: client.ledger(place.namespace, place.name), end, seen=True):
        phase, attempts = account["phase"], account["attempts"]
        if (report := drill_report(attempt, phase, attempts, ())) is not None:
            if report.heard:
                report = drill_report(attempt, phase, attempts, _steps(client, place, end))
            assert report is not None
            return report
        if phase in ("Failed", "Succeeded", "Suspended"):
            typer.echo(f"error: {place} is {phase}: no attempt goes on where {attempt} ended", err=True)
            raise typer.Exit(1)
    typer.echo(f"error: {place} does not train again after {timeout:g} s", err=True)
    raise typer.Exit(TIMED_OUT)


def _steps(client: Client, place: JobAddress, end: float) -> list[dict[str, Any]]:
    """None where nobody tells them now: on a cluster it is rank 0 that does, and the job may have ended."""
    from ..cluster import NotReady

    try:
        return next(answers(lambda: client.steps(place.namespace, place.name), end, seen=True), [])
    except NotReady as error:
        typer.echo(f"no proof: {error}", err=True)
        return []


def _document(report: DrillReport) -> dict[str, Any]:
    told = {**asdict(report), "proof": report.proof}
    return {camel(name): value for name, value in told.items()}


def _text(report: DrillReport) -> str:
    from .formats import count, duration

    verdict = f"  verdict   {report.verdict}: {report.reason}"
    if not report.heard:
        return f"{verdict}\n  lost      {report.proof}; `Run` from holdfast_trainer.run makes them known"
    return "\n".join(
        (
            verdict,
            f"  lost      {count(report.lost_steps)} steps: done up to {count(report.last_step)}, "
            f"durable up to {count(report.durable_step)}, gone on from {count(report.resumed_step)}",
            f"  recovery  {duration(report.recovery_seconds)} to the next step done",
            f"  resume    {report.proof}",
        )
    )
