"""Which files a corpus is made of, in which order, and what is in them."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from ..contract import exists, is_directory
from ..token_index import missing
from .corpus import (
    COMPRESSIONS,
    DEFAULT_PATTERNS,
    JSONL_SUFFIXES,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    PrepareError,
    Request,
    SourceFile,
)
from .progress import reporting, say
from .streams import blocks, telling
from .tables import open_table, saved_files


def list_files(request: Request, *, digests: bool = True) -> list[SourceFile]:
    """The files in the order of the sources and of their names, hashed if asked to. Raises PrepareError."""
    listed: dict[Path, SourceFile] = {}
    for source in request.sources:
        with telling(source):
            found = _found(source, request)
        for name, path in found:
            file = _stat(name, path)  # before its links are followed: they may go round in a circle
            listed.setdefault(path.resolve(), file)
    files, done = [], 0
    examined = partial(_examined, text_field=request.text_field, digests=digests)
    total = sum(file.stored for file in listed.values())
    with ThreadPoolExecutor(request.workers) as pool, reporting("reading", total, 0) as report:
        for file in pool.map(examined, listed.values()):
            files.append(file)
            done += file.stored
            report(done)
    if mistaken := [file.path for file in files if _is_json_lines(file, request.text_field)]:
        more = f" and {len(mistaken) - 1} more" if mistaken[1:] else ""
        say(
            f"warning: read as text, braces and all, as the name says: {mistaken[0]}{more}; the first line "
            f"is a JSON object with {request.text_field!r}. To have the documents in its lines, give it a "
            "name that ends in .jsonl (a link will do), or in .jsonl.gz or .jsonl.zst where it is compressed"
        )
    return files


def _is_json_lines(file: SourceFile, text_field: str) -> bool:
    """Though it is called JSON, as many a corpus is, and so is text."""
    name = file.path.with_suffix("") if file.compression else file.path
    if name.suffix.lower() != ".json":
        return False
    with telling(file.path), closing(blocks(file)) as content:
        line, _, _ = next(content, b"").partition(b"\n")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and isinstance(body.get(text_field), str)


def _found(source: Path, request: Request) -> list[tuple[str, Path]]:
    """What of a source is read: names and paths. Raises PrepareError, OSError."""
    if not is_directory(source):
        if not exists(source):
            raise PrepareError(f"source {source} does not exist") from missing(source)
        return [(source.name, source)]
    if (saved := saved_files(source)) is not None:
        return [(path.relative_to(source).as_posix(), path) for path in saved]
    found = _walk(source, request)
    if not found:
        raise PrepareError(
            f"no file in {source} matches {' or '.join(request.patterns)}"
            f"{' after ' + str(len(request.excludes)) + ' exclusions' if request.excludes else ''}; "
            f"choose others with --pattern (of a stream: patterns)"
        ) from missing(source)
    return found


def _walk(root: Path, request: Request) -> list[tuple[str, Path]]:
    out = request.out.resolve()
    found, links, left = [], [], []
    for directory, names, files in os.walk(root, onerror=_unreadable):
        here = Path(directory)
        relative = here.relative_to(root)
        names[:] = [n for n in names if not _excluded(relative / n, request) and (here / n).resolve() != out]
        links += [here / name for name in names if (here / name).is_symlink()]
        for name in files:
            path = relative / name
            wanted = any(
                fnmatch.fnmatch(name, p) or fnmatch.fnmatch(path.as_posix(), p) for p in request.patterns
            )
            if wanted and not _excluded(path, request):
                found.append((path.as_posix(), here / name))
            elif (ending := _known_ending(path)) and not _excluded(path, request):
                left.append((here / name, ending))
    if left and request.patterns == DEFAULT_PATTERNS:  # whoever gives others says what to leave out
        (first, ending), more = min(left), f" and {len(left) - 1} more" if left[1:] else ""
        say(
            f"note: left out, as their kind is taken only if asked for: {first}{more}; give --pattern "
            f"'*{ending}', and one for each other kind"
        )
    if links:
        more = f" and {len(links) - 1} more" if links[1:] else ""
        say(f"note: not followed, as links to directories: {min(links)}{more}; name those as sources, too")
    return sorted(found)


def _known_ending(path: Path) -> str:
    """Of a name that says that there is text in it; else empty."""
    packed = path.suffix if path.suffix.lower() in COMPRESSIONS else ""
    kind = (path.with_suffix("") if packed else path).suffix
    return kind + packed if kind.lower() in TEXT_SUFFIXES | JSONL_SUFFIXES | TABLE_SUFFIXES else ""


def _excluded(relative: Path, request: Request) -> bool:
    return any(
        fnmatch.fnmatch(relative.name, pattern) or fnmatch.fnmatch(relative.as_posix(), pattern)
        for pattern in request.excludes
    )


def _unreadable(error: OSError) -> None:
    raise PrepareError(f"source {error.filename} cannot be read: {error.strerror}") from error


def _stat(name: str, path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise PrepareError(f"source {path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise PrepareError(
            f"source {path} is no file but a pipe or a device, and a source is read more than once: write "
            "what comes from it to a file first"
        )
    return SourceFile(name, path, status.st_size, status.st_mtime_ns)


def _examined(file: SourceFile, *, text_field: str, digests: bool) -> SourceFile:
    """With its digest and the size of its text. Raises PrepareError where it is not what its name says."""
    with telling(file.path), open(file.path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest() if digests else ""
    if file.kind == "table" and file.compression:
        raise PrepareError(f"source {file.path} is compressed around its own compression: unpack it first")
    if file.kind == "table":
        size = open_table(file.path, text_field).size
    elif file.compression:
        with telling(file.path):
            size = sum(map(len, blocks(file)))
    else:
        size = file.stored
    return dataclasses.replace(file, size=size, sha256=digest)


def corpus_digest(files: Iterable[SourceFile]) -> str:
    """SHA-256 (hex) of names, sizes and, where hashed, contents; not of times or of where the files are."""
    lines = "".join(f"{f.name}\0{f.size}\0{f.sha256}\n" for f in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()
