"""The controller's directory on this machine: what lies where, and who may read it.

    token          the bearer token, made at first start, readable by its owner alone
    server.json    where the running controller listens; `holdfast` finds it here
    lock           held by the running controller for as long as it lives
    holdfast.db    the job store
    runs/          run directories, by namespace and job
    prometheus-targets.json    where Prometheus finds the running trainers (local/targets.py)

The command line imports this module on every start, so it imports the standard library only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast_trainer.contract import NO_ROOM, exists, replace_durably


class DataDirectoryError(Exception):
    """The directory or a file in it cannot be used; the message says which and what to do."""


@dataclass(frozen=True)
class ServerFile:
    """What `server.json` says about the controller that wrote it."""

    url: str
    token_file: str | None
    """None where the controller was started without a token."""
    pid: int


@dataclass(frozen=True)
class DataDirectory:
    """Paths; nothing is touched until a method is called."""

    path: Path

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def server_file(self) -> Path:
        return self.path / "server.json"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def database(self) -> Path:
        return self.path / "holdfast.db"

    def has_database(self) -> bool:
        """Raises DataDirectoryError."""
        try:
            return exists(self.database)
        except OSError as error:
            raise DataDirectoryError(f"cannot look for {self.database}: {error.strerror}") from error

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def create(self) -> None:
        """Make the directory, for its owner alone. Raises DataDirectoryError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DataDirectoryError(
                f"cannot make the data directory {self.path}: {error.strerror}; "
                "give another with --data-dir or HOLDFAST_DATA_DIR"
            ) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise DataDirectoryError(
                f"cannot write to the data directory {self.path}; "
                "make it yours, or give another with --data-dir or HOLDFAST_DATA_DIR"
            )

    def lock(self) -> int:
        """Hold the directory until the returned descriptor is closed (or the process ends).

        Raises DataDirectoryError where another controller holds it, or nobody can.
        """
        with _writing(self.lock_file):
            descriptor = os.open(self.lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise _cannot_write(self.lock_file, error) from error
            running = self.read_server_file()
            where = f" (process {running.pid}, at {running.url})" if running else ""
            raise DataDirectoryError(
                f"another controller already uses the data directory {self.path}{where}: "
                "use that one, stop it first, or give another directory with --data-dir"
            ) from None
        return descriptor

    def write_server_file(self, server: ServerFile) -> None:
        """Raises DataDirectoryError."""
        body = {
            "url": server.url,
            "tokenFile": server.token_file,
            "pid": server.pid,
            "dataDir": str(self.path),
        }
        with _writing(self.server_file):
            replace_durably(self.server_file, json.dumps(body) + "\n")

    def read_server_file(self) -> ServerFile | None:
        """None where there is none, or what is there is not ours: it came along where another directory was
        copied, whose controller has jobs of the same names."""
        try:
            body = json.loads(self.server_file.read_text(encoding="utf-8"))
            found = ServerFile(str(body["url"]), body["tokenFile"], int(body["pid"]))
            return None if self._is_copy_of(body.get("dataDir")) else found
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def is_copy(self) -> bool:
        """Whether it was copied from another, which is still there, since a controller last ran with it."""
        try:
            return self._is_copy_of(json.loads(self.server_file.read_text(encoding="utf-8")).get("dataDir"))
        except (OSError, ValueError, AttributeError, TypeError):
            return False

    def _is_copy_of(self, other: str | None) -> bool:
        """Of another data directory that is still there; ours may have been moved, or have several paths."""
        if other is None or not exists(DataDirectory(Path(other)).lock_file):
            return False
        return not self.path.samefile(other)

    def remove_server_file(self, pid: int) -> None:
        """Take back what this process wrote; a file of another process stays, as does one on a disk that has
        failed: whoever reads it finds that nobody answers there."""
        written = self.read_server_file()
        if written is not None and written.pid == pid:
            with suppress(OSError):
                self.server_file.unlink(missing_ok=True)


def default_data_directory() -> Path:
    """`HOLDFAST_DATA_DIR`, else `holdfast` under XDG_DATA_HOME, else ~/.local/share/holdfast.

    Raises DataDirectoryError where that is below a home that nobody has."""
    given = os.environ.get("HOLDFAST_DATA_DIR")
    if given:
        return whole_path(Path(given))
    base = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification: a relative path there is to be ignored.
    root = Path(base) if base.startswith("/") else whole_path(Path("~/.local/share"))
    return root / "holdfast"


def is_default(directory: Path) -> bool:
    """Whether commands find it without being told."""
    with suppress(DataDirectoryError):
        return directory == default_data_directory()
    return False


def whole_path(path: Path) -> Path:
    """With the home that `~` stands for, which no shell puts into `--data-dir=~/jobs`. Raises
    DataDirectoryError where there is none, as of a user whom a container has by number alone."""
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise DataDirectoryError(
            f"cannot tell what {path.parts[0]} is, the home of {path.parts[0][1:] or f'user {os.getuid()}'}: "
            "set HOME, or give a data directory with --data-dir or HOLDFAST_DATA_DIR"
        ) from None
    except FileNotFoundError:
        raise DataDirectoryError(f"{path} leads nowhere: this terminal's directory was removed") from None


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises DataDirectoryError for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> DataDirectoryError:
    remedies = {errno.EROFS: "mount its file system for writing"} | dict.fromkeys(NO_ROOM, "free some space")
    remedy = remedies.get(error.errno or 0, "make it yours")
    return DataDirectoryError(
        f"cannot write {path}: {error.strerror}; {remedy}, or give another data directory with --data-dir"
    )


def make_token(path: Path) -> None:
    """Write a new token, for its owner's eyes, unless there is one; two starts at once agree on one.

    Raises DataDirectoryError.
    """
    if exists(path):
        return
    with _writing(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp makes the file readable by its owner alone.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                if _open_to_others(os.fstat(descriptor)):
                    raise DataDirectoryError(
                        f"the file system of {path.parent} keeps no modes, as FAT and NTFS do not, so others "
                        "of this machine could use the token: name a directory on another with --data-dir"
                    )
                file.write(secrets.token_urlsafe(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            # A link never replaces: whoever comes second keeps the first one's token.
            with suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.unlink(temporary)


def _open_to_others(file: os.stat_result) -> bool:
    return bool(file.st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def read_token(path: Path) -> str:
    """The token in a file. Raises DataDirectoryError where it is missing, empty or open to others."""
    try:
        mode = path.stat()
        token = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise DataDirectoryError(f"no token file at {path}: `holdfast up` makes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataDirectoryError(f"cannot read the token file {path}: {error}") from error
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise DataDirectoryError(
            f"the token file {path} holds no token of at least 16 characters: name the one that "
            "`holdfast up` prints; if it is that, delete it and start the controller again for a new one"
        )
    if _open_to_others(mode):
        raise DataDirectoryError(
            f"the token file {path} has mode {stat.S_IMODE(mode.st_mode):04o}, so others on this machine "
            f"can use it: `chmod 600 {path}`, or delete it and start again for a new token"
        )
    return token
