"""The command tree, and what all commands share: options, exit codes, errors as one clear line.

Commands import what they need when they run: `holdfast --help` and shell completion load neither
pydantic nor httpx, and no command but `up` loads the server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..data_directory import DataDirectoryError
from . import changing, showing, submission, watching
from .connection import Connection
from .exits import ERROR, INTERRUPTED, PIPE_CLOSED

if TYPE_CHECKING:
    from ..settings import Settings

EPILOG = (
    "Exit codes: 0 done; 1 an error, told on stderr; 2 wrong usage; "
    "3 the job that was waited for failed; 4 the wait timed out."
)

StartController = Callable[["Settings", bool], None]
"""Runs a controller until it is asked to end; the flag: suspend its jobs first."""


class _Commands(TyperGroup):
    """Turns our errors into a line on stderr and an exit code; a traceback is a bug of ours."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever read our output has seen enough; Python must not try to flush the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None
        except DataDirectoryError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(ERROR) from None
        except Exception as error:
            tell(error)
            raise typer.Exit(ERROR) from None


def tell(error: Exception) -> None:
    """One of our errors as people read it; any other is raised again."""
    from ..cluster import HoldfastError, Invalid

    if not isinstance(error, HoldfastError):
        raise error
    typer.echo(f"error: {error}", err=True)
    if isinstance(error, Invalid) and len(error.errors) > 1:
        for line in error.errors:
            typer.echo(f"  {line}", err=True)


def create_cli(start_controller: StartController) -> typer.Typer:
    """The whole command; `start_controller` is what `up` runs."""
    cli = typer.Typer(
        name="holdfast",
        cls=_Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=EPILOG,
    )
    cli.callback(epilog=EPILOG)(_shared)
    cli.command("up")(_up_command(start_controller))
    for module in (submission, showing, watching, changing):
        module.add_to(cli)
    cli.command("version")(_version)
    return cli


def _shared(
    ctx: typer.Context,
    server: Annotated[
        str | None, typer.Option(envvar="HOLDFAST_SERVER", help="The controller's address.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(envvar="HOLDFAST_TOKEN_FILE", help="File that holds the token.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="HOLDFAST_DATA_DIR", help="The controller's directory on this machine."),
    ] = None,
) -> None:
    """Train PyTorch models on interruptible GPUs and lose no work.

    The controller is found by --server and --token-file, else HOLDFAST_SERVER and HOLDFAST_TOKEN,
    else by the files that `holdfast up` leaves in its data directory.
    """
    ctx.obj = Connection(server, token_file, data_dir)


def _version(ctx: typer.Context) -> None:
    """Show the version of this command."""
    typer.echo(version("holdfast"))


def _up_command(start_controller: StartController) -> Callable[..., None]:
    def up(
        ctx: typer.Context,
        data_dir: Annotated[
            Path | None, typer.Option(help="Jobs, run directories, token; made where missing.")
        ] = None,
        host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
        port: Annotated[
            int | None, typer.Option(help="Port to listen on (8765); 0 takes a free one.")
        ] = None,
        no_token: Annotated[
            bool, typer.Option("--no-token", help="Ask nobody for a token; on loopback only.")
        ] = False,
        cpu_slots: Annotated[
            int | None, typer.Option(help="CPU ranks that may run at once (this machine's cores).")
        ] = None,
        gpus: Annotated[int | None, typer.Option(help="GPUs to use (all of this machine).")] = None,
        stop_jobs: Annotated[
            bool, typer.Option("--stop-jobs", help="On the way out, suspend the jobs that run.")
        ] = False,
        log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (info).")] = None,
        log_format: Annotated[str | None, typer.Option(help="auto, console or json (auto).")] = None,
    ) -> None:
        """Start the controller and the local engine in this process.

        Ctrl-C ends the controller. Jobs that run go on without it, and the next `holdfast up` finds
        them again; with --stop-jobs they are suspended first, after a checkpoint.
        """
        from ..settings import load_settings

        shared: Connection = ctx.obj
        settings = load_settings(
            data_dir=data_dir or shared.data_dir,
            listen_host=host,
            listen_port=port,
            no_token=no_token or None,
            cpu_slots=cpu_slots,
            gpus=gpus,
            log_level=log_level,
            log_format=log_format,
        )
        start_controller(settings, stop_jobs)

    return up
