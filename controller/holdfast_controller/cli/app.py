"""The command tree, and what all commands share: options, exit codes, errors as one clear line.

Commands import what they need when they run: `holdfast --help` and shell completion load neither
pydantic nor httpx, and no command but `up` loads the server.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from holdfast_trainer.contract import NO_ROOM

from ..data_directory import DataDirectoryError
from . import changing, drilling, explaining, gpus, showing, submission, watching
from .connection import Connection, not_empty, path_given
from .controller import StartOnCluster, controller_command
from .exits import ERROR, INTERRUPTED, PIPE_CLOSED
from .up import StartController, up_command

EPILOG = (
    "Exit codes: 0 done; 1 an error, told on stderr; 2 wrong usage; "
    "3 the job that was waited for failed; 4 the wait timed out."
)


_NO_ROOM = NO_ROOM | {errno.EFBIG}
"""Where the output goes to a file; an error of another file names it."""


class _Commands(TyperGroup):
    """Turns our errors into a line on stderr and an exit code; a traceback is a bug of ours."""

    def make_context(self, *words: Any, **given: Any) -> Any:
        """Here `holdfast --help` writes."""
        with _output_told():
            return super().make_context(*words, **given)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _output_told():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except DataDirectoryError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(ERROR) from None
        except Exception as error:
            if _is_interrupt(error):
                raise typer.Exit(INTERRUPTED) from None
            tell(error)
            raise typer.Exit(ERROR) from None


def _is_interrupt(error: Exception) -> bool:
    """Ctrl-C while pydantic builds a model, as at its import, comes as a schema that it cannot build."""
    return type(error).__name__ == "SchemaError" and "KeyboardInterrupt" in str(error)


@contextmanager
def _output_told() -> Iterator[None]:
    """An output that takes no more ends the command: without a word where nobody reads on, else with one."""
    try:
        yield
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        _drop_output()
        raise typer.Exit(PIPE_CLOSED) from None
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise
        _drop_output()
        typer.echo(f"error: the output could not be written: {error.strerror}", err=True)
        raise typer.Exit(ERROR) from None


def _drop_output() -> None:
    """Python must not try to flush the rest as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(error: Exception) -> None:
    """One of our errors as people read it; any other is raised again."""
    from ..cluster import HoldfastError, Invalid

    if not isinstance(error, HoldfastError):
        raise error
    if isinstance(error, Invalid) and len(error.errors) > 1:
        typer.echo(f"error: {len(error.errors)} things are wrong", err=True)
        for line in error.errors:
            typer.echo(f"  {line}", err=True)
    else:
        typer.echo(f"error: {error}", err=True)


def create_cli(start_controller: StartController, start_on_cluster: StartOnCluster) -> typer.Typer:
    """The whole command; the two are what `up` and `controller` run."""
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
    cli.command("up")(up_command(start_controller))
    cli.command("controller")(controller_command(start_on_cluster))
    for module in (submission, showing, watching, drilling, changing, explaining, gpus):
        module.add_to(cli)
    cli.command("version")(_version)
    return cli


def _shared(
    ctx: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(envvar="HOLDFAST_SERVER", help="The controller's address.", callback=not_empty),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="HOLDFAST_TOKEN_FILE",
            help="File that holds the token.",
            parser=path_given,
            metavar="<path>",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="HOLDFAST_DATA_DIR",
            help="The controller's directory on this machine.",
            parser=path_given,
            metavar="<path>",
        ),
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
