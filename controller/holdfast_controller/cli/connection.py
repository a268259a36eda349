"""How a command finds the controller and its token: flags, then the environment, then the data directory."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from holdfast_trainer.contract import exists

from ..data_directory import (
    DataDirectory,
    DataDirectoryError,
    default_data_directory,
    read_token,
    whole_path,
)
from ..listeners import HERE, users_listening

if TYPE_CHECKING:
    from ..client import Client

DEFAULT_SERVER = "http://127.0.0.1:8765"
EMPTY = "it is empty, as of a variable that is not set; leave it out if that is meant"
COMPLETION_SECONDS = 1.0
"""A shell that completes must not hang."""


@dataclass(frozen=True)
class Connection:
    """What the user said about where the controller is; None: nothing."""

    server: str | None = None
    token_file: Path | None = None
    data_dir: Path | None = None

    @property
    def directory(self) -> DataDirectory:
        return DataDirectory(whole_path(self.data_dir) if self.data_dir else default_data_directory())

    def address(self) -> str:
        """The controller's address. Raises Invalid for one that was given and cannot be one."""
        if self.server:
            _check_address(self.server)
            return self.server
        running = self.directory.read_server_file()
        return running.url if running else DEFAULT_SERVER

    def token(self) -> str | None:
        """The token for `address`. Raises DataDirectoryError for a file that was named and is no good, and
        where another user would be sent what only our controller may see."""
        if self.token_file is not None:
            return read_token(whole_path(self.token_file))
        if given := _token_in_environment():
            return given
        # This machine's token is for this machine's controller, not for whatever --server names.
        if not self._is_here(self.address()):
            return None
        if not exists(self.directory.token):
            self._refuse_to_guess(self.address())
            return None
        self._refuse_others(self.address())
        return read_token(self.directory.token)

    def _is_here(self, server: str) -> bool:
        """Whether it is this machine's: by its name, or as the controller left it in the directory."""
        running = self.directory.read_server_file()
        ours = running is not None and running.url == server.rstrip("/")
        return ours or urlsplit(server).hostname in HERE

    def _refuse_others(self, server: str) -> None:
        """Raises DataDirectoryError where another user listens in the place of our controller, which was at
        `server`, an address of this machine."""
        known_to = {os.getuid(), 0}
        with suppress(FileNotFoundError):  # it is made anew when the controller starts
            known_to.add(self.directory.token.stat().st_uid)
        if others := _users_at(server) - known_to:
            raise DataDirectoryError(
                f"{server} is answered by another user of this machine (uid {min(others)}), who "
                f"would learn the token in {self.directory.token}, and with it may do all that you may: "
                "start `holdfast up`, or name the controller that you mean with --server and --token-file"
            )

    def _refuse_to_guess(self, server: str) -> None:
        """Raises DataDirectoryError where nobody named a controller and there is none of ours, and the one at
        the usual address is another user's: he alone has its token."""
        if self.server is None and (others := _users_at(server) - {os.getuid()}):
            raise DataDirectoryError(
                f"at {server} another user of this machine answers (uid {min(others)}), and you have no "
                f"controller of your own in {self.directory.path}: start one with `holdfast up --port 0`, or "
                "name the one that you mean with --server and --token-file"
            )

    def _require_the_named_one(self) -> None:
        """Raises DataDirectoryError where a data directory was named, or the usual one is a copy, and none of
        its controller's files says where that listens: whoever answers at the usual address is another one,
        with other jobs, and to that of the original the copy's token is good."""
        if self.server or self.token_file is not None or _token_in_environment():
            return
        if self.data_dir is None and not self.directory.is_copy:
            return
        if self.directory.read_server_file() is None:
            if exists(self.directory.path) and not os.access(self.directory.path, os.X_OK):
                raise DataDirectoryError(
                    f"the data directory {self.directory.path} is closed to you: name its controller with "
                    "--server, and with --token-file a file of yours that holds its token"
                )
            raise DataDirectoryError(
                f"no controller runs with the data directory {self.directory.path}: start one with "
                f"`holdfast --data-dir {shlex.quote(str(self.directory.path))} up`, or name the one that you "
                "mean with --server"
            )

    def client(self, timeout: float = 10.0) -> Client:
        from ..client import Client

        def warned(text: str) -> None:
            typer.echo(f"warning: {text}", err=True)

        self._require_the_named_one()
        token = self.token()
        named = self.token_file is not None or _token_in_environment() is not None

        def before() -> None:  # whoever waits for the controller comes again, and another may listen by then
            if token and not named:
                self._refuse_others(client.server)

        def moved() -> str | None:  # one that was started again may listen on another port
            running = None if self.server else self.directory.read_server_file()
            return running.url if running else None

        client = Client(
            self.address(),
            token,
            timeout=timeout,
            warned=warned,
            before=before,
            reread=self.token,
            moved=moved,
        )
        return client


def _users_at(server: str) -> set[int]:
    """Who listens at this address of this machine."""
    address = urlsplit(server)
    return users_listening(address.hostname or "", address.port or 80)


def not_empty(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
    """As it came. Raises BadParameter for what was typed and is empty, as "$TEAM" is where that is not set:
    it would mean what leaving it out does, another controller or more jobs."""
    source = ctx.get_parameter_source(param.name or "")
    if value == "" and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter(EMPTY)
    return value


def path_given(text: str) -> Path:
    """Likewise, of a path: an empty one would be the current directory."""
    if not text:
        raise typer.BadParameter(EMPTY)
    return Path(text)


def _token_in_environment() -> str | None:
    """None where there is none. Raises DataDirectoryError, without a word of what it is, where no header can
    have it; an end of line, as of a file that it was read from, is no part of it."""
    given = os.environ.get("HOLDFAST_TOKEN", "").strip()
    if not given.isprintable() or " " in given:
        raise DataDirectoryError("HOLDFAST_TOKEN holds no token: in one are no spaces and no ends of lines")
    return given or None


def _check_address(server: str) -> None:
    """Raises Invalid where it cannot be taken apart."""
    from ..cluster import Invalid

    try:
        urlsplit(server).port  # noqa: B018  # a number is looked for only now
    except ValueError as error:
        raise Invalid(f"{server!r} is no address of a controller: {error}") from None


@dataclass(frozen=True)
class JobAddress:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def namespace_in_environment() -> str | None:
    """The namespace of whoever names none: neither as it is typed nor in a job's document."""
    return os.environ.get("HOLDFAST_NAMESPACE") or None


def default_namespace() -> str:
    return namespace_in_environment() or "default"


def locate(job: str, namespace: str | None) -> JobAddress:
    """`name`, in the namespace given or the default one; or `namespace/name`, as messages write it."""
    given, slash, name = job.rpartition("/")
    if slash and namespace not in (None, given):
        raise typer.BadParameter(f"{job} names namespace {given!r}, but -n says {namespace!r}")
    return JobAddress(given if slash else namespace or default_namespace(), name)


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of jobs for shell completion; none where the controller does not answer."""
    root = ctx.find_root().params
    connection = Connection(root.get("server"), root.get("token_file"), root.get("data_dir"))
    try:
        with connection.client(COMPLETION_SECONDS) as client:
            jobs = client.list_jobs(ctx.params.get("namespace") or default_namespace())
    except Exception:
        return []  # A message here would land in the middle of the user's line.
    return [job.metadata.name for job in jobs if job.metadata.name.startswith(incomplete)]


Job = Annotated[
    str, typer.Argument(metavar="JOB", help="NAME or NAMESPACE/NAME.", autocompletion=complete_job)
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "-n", "--namespace", help="Namespace (HOLDFAST_NAMESPACE, else default).", callback=not_empty
    ),
]
