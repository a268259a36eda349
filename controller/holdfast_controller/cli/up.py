"""`holdfast up`: the controller and the local engine in this process, and what it says about itself."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..data_directory import is_default
from .connection import path_given

if TYPE_CHECKING:
    from ..jobs import TrainingJob
    from ..server import Listening
    from ..settings import Settings

JOBS_NAMED = 5

StartController = Callable[["Settings", bool, "Voice"], None]
"""Runs a controller until it is asked to end; the flag: suspend its jobs first."""


class Voice:
    """What the controller tells the person who started it, on standard output; logs go to stderr."""

    def __init__(self) -> None:
        self._command = "holdfast"

    def started(self, settings: Settings, listening: Listening) -> None:
        """Where it answers, and the three commands to type next."""
        if not is_default(settings.data_dir):
            self._command += f" --data-dir {shlex.quote(str(settings.data_dir))}"
        command = self._command
        token = listening.directory.token if listening.token else "none: whoever is on this machine may call"
        slots = f"{settings.cpu_slots} CPU slot{'' if settings.cpu_slots == 1 else 's'}"
        gpus = f"{len(settings.devices)} GPU{'' if len(settings.devices) == 1 else 's'}"
        lines = [
            f"Holdfast {version('holdfast')} answers at {listening.url}",
            f"  data   {settings.data_dir}{' (new: no jobs were there)' if listening.new else ''}",
            f"  token  {token}",
            f"  room   {slots}, {gpus}",
            "",
            "Next, in another terminal:",
            f"  {command} submit job.yaml",
            f"  {command} top",
            f"  {command} logs -f JOB",
            "",
        ]
        typer.echo("\n".join(lines))

    def suspending(self) -> None:
        _tell_if_heard("Suspending all jobs; a second Ctrl-C does not wait for them.")

    def ended(self, active: Sequence[TrainingJob]) -> None:
        """What goes on without the controller, and what comes to an end without it."""
        going_on = [job for job in active if not job.spec.suspend and _has_attempt(job)]
        resting = [job for job in active if not job.spec.suspend and not _has_attempt(job)]
        stopping = [job for job in active if job.spec.suspend]
        sentences = ["Stopped."]
        if not going_on and not stopping:
            sentences.append("No job runs.")
        if going_on:
            verb, them = ("goes", "it") if len(going_on) == 1 else ("go", "them")
            sentences.append(
                f"{_names(going_on)} {verb} on without the controller; `{self._command} up` finds {them} "
                "again."
            )
        if resting:
            verb = "starts" if len(resting) == 1 else "start"
            sentences.append(
                f"{_names(resting)} {verb} again under the next `{self._command} up`, after a back-off."
            )
        if stopping:
            verb, they = ("is", "it ends") if len(stopping) == 1 else ("are", "they end")
            sentences.append(
                f"{_names(stopping)} {verb} still being suspended: {they} after a checkpoint, or under the "
                f"next `{self._command} up`; `{self._command} resume` lets a job go on then."
            )
        _tell_if_heard(" ".join(sentences))


def _tell_if_heard(text: str) -> None:
    """A closed terminal, or a tee that the same Ctrl-C ended, hears nothing; the end is as orderly."""
    with suppress(OSError):
        typer.echo(text)


def _has_attempt(job: TrainingJob) -> bool:
    """Whether one is open; between two, in a back-off, nothing of a job runs."""
    return bool(job.status.attempts) and job.status.attempts[-1].verdict is None


def _names(jobs: Sequence[TrainingJob]) -> str:
    more = f" and {len(jobs) - JOBS_NAMED} more" if len(jobs) > JOBS_NAMED else ""
    return ", ".join(job.key for job in jobs[:JOBS_NAMED]) + more


def up_command(start_controller: StartController) -> Callable[..., None]:
    """The command over a composition root."""

    def up(
        ctx: typer.Context,
        data_dir: Annotated[
            Path | None,
            typer.Option(
                help="Jobs, run directories, token; made where missing.", parser=path_given, metavar="<path>"
            ),
        ] = None,
        host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
        port: Annotated[
            int | None, typer.Option(help="Port to listen on (8765); 0 takes a free one.")
        ] = None,
        no_token: Annotated[
            bool, typer.Option("--no-token", help="Ask for no token; on loopback only.")
        ] = False,
        cpu_slots: Annotated[
            int | None, typer.Option(help="CPU ranks that may run at once (this machine's cores).")
        ] = None,
        gpus: Annotated[
            int | None,
            typer.Option(help="How many GPUs to use: the first that CUDA_VISIBLE_DEVICES shows (all)."),
        ] = None,
        stop_jobs: Annotated[
            bool, typer.Option("--stop-jobs", help="On the way out, suspend the jobs that run.")
        ] = False,
        log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (info).")] = None,
        log_format: Annotated[str | None, typer.Option(help="auto, console or json (auto).")] = None,
    ) -> None:
        """Start the controller and the local engine in this process.

        Ctrl-C ends the controller, as does closing its terminal. Jobs that run go on without it, and the
        next `holdfast up` finds them again; with --stop-jobs they are suspended first, after a checkpoint.
        A second Ctrl-C does not wait for that.
        """
        from ..settings import load_settings

        settings = load_settings(
            data_dir=data_dir or ctx.obj.data_dir,
            listen_host=host,
            listen_port=port,
            no_token=no_token or None,
            cpu_slots=cpu_slots,
            gpus=gpus,
            log_level=log_level,
            log_format=log_format,
        )
        start_controller(settings, stop_jobs, Voice())

    return up
