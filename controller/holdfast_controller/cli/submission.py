"""`holdfast submit`: from a file and some --set to a job, or to the plan of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .connection import JobAddress, NamespaceOption, default_namespace
from .documents import TextOutput, print_document
from .exits import ERROR


def add_to(cli: typer.Typer) -> None:
    cli.command("submit")(submit)


def submit(
    ctx: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A TrainingJob as YAML or JSON; - reads stdin.")
    ],
    namespace: NamespaceOption = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a value, e.g. --set spec.replicas=2."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, and why it could not run here.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Stay until it ends; exit 3 if it failed.")
    ] = False,
    output: Annotated[
        TextOutput, typer.Option("-o", "--output", help="How the job, or with --dry-run the plan, is shown.")
    ] = TextOutput.TEXT,
) -> None:
    """Submit a job."""
    if watch and not dry_run and output is not TextOutput.TEXT:
        raise typer.BadParameter("-w shows the job in lines: leave out -o, or -w")
    document = read_document(file)
    for assignment in assignments or []:
        assign(document, assignment)
    metadata = document.get("metadata")
    written = metadata.get("namespace") if isinstance(metadata, dict) else None
    # What was typed wins over what was written only where nothing was written: the server tells.
    target = namespace or (written if isinstance(written, str) else None) or default_namespace()
    with ctx.obj.client() as client:
        if dry_run:
            show_plan(client.plan(document, target), output)
            return
        job = client.submit(document, target)
        address = JobAddress(job.metadata.namespace, job.metadata.name)
        typer.echo(f"{address} submitted", err=output is not TextOutput.TEXT)
        if output is not TextOutput.TEXT:
            print_document(job.to_dict(), output)
        if watch:
            from .watching import stay

            stay(client, address)


def read_document(file: str) -> dict[str, Any]:
    """The mapping in a file, or on stdin for `-`. Raises Invalid, naming file and line."""
    from ..cluster import Invalid
    from ..documents import parse

    if not file:
        raise Invalid("the name of the job's file is empty, as where a shell's variable is not set")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except FileNotFoundError:
        raise Invalid(f"there is no file {file}") from None
    except OSError as error:
        raise Invalid(f"cannot read {file}: {error.strerror}") from error
    return parse(data, "stdin" if file == "-" else file, "json" if file.endswith(".json") else "yaml")


def assign(document: dict[str, Any], assignment: str) -> None:
    """Apply `spec.config.train.steps=100` to a document; the value is YAML. Raises Invalid."""
    from ..cluster import Invalid
    from ..documents import parse_value

    path, equals, text = assignment.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise Invalid(f"--set {assignment}: write it as a dotted path and a value, e.g. spec.replicas=2")
    place: Any = document
    for depth, key in enumerate(keys[:-1], 1):
        inner = {} if place.get(key) is None else place[key]
        if not isinstance(inner, dict):
            raise Invalid(f"--set {assignment}: {'.'.join(keys[:depth])} is {inner!r}, not a mapping")
        place[key] = dict(inner)  # behind an alias it is the very mapping that stands elsewhere too
        place = place[key]
    place[keys[-1]] = parse_value(text, f"--set {assignment}")


def show_plan(plan: dict[str, Any], output: TextOutput) -> None:
    """Print a dry run; exits 1 where the job could not run here."""
    if output is not TextOutput.TEXT:
        print_document(plan, output)
    else:
        print_document({"manifests": plan["manifests"]}, "yaml")
        for note in plan["notes"]:
            typer.echo(f"note: {note}")
        for reason in plan["reasons"]:
            typer.echo(f"it cannot run here: {reason}", err=True)
        if plan["feasible"]:
            typer.echo(f"it can run here, on the {plan['engine']} engine; nothing was submitted")
    if not plan["feasible"]:
        raise typer.Exit(ERROR)
