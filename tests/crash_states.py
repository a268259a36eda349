"""Records what a save does to the file system, and makes the states that a crash may leave of it.

After T. S. Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014), with a file system weaker
than ext4: between two syncs of a file each of its writes may be missing, torn or overtaken by a later one,
and its size may be there without its data; between two syncs of a directory each change of its entries may
be missing, whatever came after it. What was synced stays. A rename is one change.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast_trainer.checkpoint.storage import Storage

SECTOR = 512

Content = bytes
Tree = dict[str, Any]
"""Names to Content (a file) or Tree (a directory)."""


@dataclass(frozen=True)
class Operation:
    kind: str
    path: Path | None = None
    target: Path | None = None
    file: int = 0
    data: bytes = b""
    offset: int = 0


class Recorder(Storage):
    """Does everything for real, and keeps an account of it."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._lock = threading.RLock()
        self._open: dict[int, int] = {}
        self._files = 0

    def note(self, text: str) -> None:
        """A mark of the test's own between operations."""
        with self._lock:
            self.operations.append(Operation("note", data=text.encode()))

    def make_directory(self, path: Path) -> None:
        with self._lock:
            new = not path.exists()
            super().make_directory(path)
            if new:
                self.operations.append(Operation("mkdir", path))

    def create(self, path: Path, *, direct: bool = False) -> int:
        with self._lock:
            fd = super().create(path, direct=direct)
            self._files += 1
            self._open[fd] = self._files
            self.operations.append(Operation("create", path, file=self._files))
            return fd

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        super().write(fd, data, offset)
        self._add("write", fd, bytes(data), offset)

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._add("truncate", fd, b"", size)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._add("sync", fd, b"", 0)

    def _add(self, kind: str, fd: int, data: bytes, offset: int) -> None:
        with self._lock:
            self.operations.append(Operation(kind, file=self._open[fd], data=data, offset=offset))

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            super().rename(source, target)
            self.operations.append(Operation("rename", source, target))

    def unlink(self, path: Path, held: int | None = None) -> None:
        with self._lock:
            there = path.exists()
            super().unlink(path, held)
            if there:
                self.operations.append(Operation("unlink", path))

    def sync_directory(self, path: Path, held: int | None = None) -> None:
        with self._lock:
            super().sync_directory(path, held)
            self.operations.append(Operation("sync_directory", path))

    def remove_held(self, path: Path, held: int) -> None:
        with self._lock:
            for child in sorted(path.iterdir()):
                self.unlink(child, held)
            super().remove_held(path, held)
            self.operations.append(Operation("unlink", path))

    def remove_tree(self, path: Path) -> None:
        with self._lock:
            children = sorted(path.iterdir()) if path.exists() else []
            for child in children:
                assert child.is_file(), child
                self.unlink(child)
            super().remove_tree(path)
            self.operations.append(Operation("unlink", path))


@dataclass
class File:
    durable: Content = b""
    pending: list[Operation] = field(default_factory=list)


@dataclass
class Directory:
    durable: dict[str, int] = field(default_factory=dict)
    """Node by name."""
    pending: list[tuple[str | None, str | None, int]] = field(default_factory=list)
    """(name that goes, name that comes, node)."""

    def entries(self, chosen: list[bool]) -> dict[str, int]:
        found = dict(self.durable)
        for (gone, come, node), happens in zip(self.pending, chosen, strict=True):
            if happens:
                if gone is not None:
                    found.pop(gone, None)
                if come is not None:
                    found[come] = node
        return found


class Disk:
    """What is surely there, and what may be there, while operations go on."""

    def __init__(self, root: Path) -> None:
        """With all that is below `root` now, as synced."""
        self._root = root
        self.nodes: dict[int, File | Directory] = {}
        self._by_record: dict[int, int] = {}
        self._now: dict[Path, int] = {}
        self._add_tree(root)

    def _add(self, node: File | Directory) -> int:
        self.nodes[len(self.nodes)] = node
        return len(self.nodes) - 1

    def _add_tree(self, path: Path) -> int:
        if path.is_file():
            node = self._add(File(path.read_bytes()))
        else:
            directory = Directory()
            node = self._add(directory)
            for child in path.iterdir():
                directory.durable[child.name] = self._add_tree(child)
        self._now[path] = node
        return node

    def _parent(self, path: Path) -> Directory:
        node = self.nodes[self._now[path.parent]]
        assert isinstance(node, Directory)
        return node

    def do(self, op: Operation) -> None:
        path = op.path
        if op.kind in ("create", "mkdir"):
            assert path is not None
            node = self._add(File() if op.kind == "create" else Directory())
            self._by_record[op.file] = node
            self._parent(path).pending.append((None, path.name, node))
            self._now[path] = node
        elif op.kind in ("write", "truncate", "sync"):
            file = self.nodes[self._by_record[op.file]]
            assert isinstance(file, File)
            file.pending.append(op)
            if op.kind == "sync":
                file.durable, file.pending = apply(file.durable, file.pending), []
        elif op.kind == "rename":
            assert path is not None
            assert op.target is not None
            assert path.parent == op.target.parent, "two directories would need a model of their order"
            node = self._now[path]
            self._parent(path).pending.append((path.name, op.target.name, node))
            moved = {p: n for p, n in self._now.items() if p == path or path in p.parents}
            for old, which in moved.items():
                del self._now[old]
                self._now[op.target / old.relative_to(path)] = which
        elif op.kind == "unlink":
            assert path is not None
            self._parent(path).pending.append((path.name, None, 0))
            del self._now[path]
        elif op.kind == "sync_directory":
            directory = self.nodes[self._now[path]] if path in self._now else None
            if isinstance(directory, Directory):
                directory.durable = directory.entries([True] * len(directory.pending))
                directory.pending = []

    def states(self, most: int, chance: random.Random) -> Iterator[Tree]:
        """What a crash now may leave: everything where that is at most `most`, else that many by chance."""
        unsure = {n: node for n, node in self.nodes.items() if node.pending}
        choices: dict[int, list[Any]] = {}
        for number, node in unsure.items():
            if isinstance(node, File):
                choices[number] = contents(node)
            else:
                choices[number] = subsets(len(node.pending), chance)
        total = 1
        for options in choices.values():
            total *= len(options)
        if total <= most:
            picks: Any = itertools.product(*choices.values())
        else:
            extremes = [[o[0] for o in choices.values()], [o[-1] for o in choices.values()]]
            by_chance = ([chance.choice(o) for o in choices.values()] for _ in range(most - 2))
            picks = itertools.chain(extremes, by_chance)
        for pick in picks:
            yield self._tree(0, dict(zip(choices, pick, strict=True)))

    def _tree(self, number: int, picked: dict[int, Any]) -> Any:
        node = self.nodes[number]
        if isinstance(node, File):
            return picked.get(number, node.durable)
        entries = node.entries(picked.get(number, []))
        return {name: self._tree(child, picked) for name, child in entries.items()}


def apply(content: Content, operations: list[Operation]) -> Content:
    for op in operations:
        before = content[: op.offset].ljust(op.offset, b"\0")
        if op.kind == "write":
            content = before + op.data + content[op.offset + len(op.data) :]
        elif op.kind == "truncate":
            content = before
    return content


def contents(file: File) -> list[Content]:
    """What un-synced writes may have made of a file: nothing first, all of them last.

    A write is torn at any sector, and the size may have grown with sectors that hold nothing yet.
    """
    found = [file.durable]
    for chosen in itertools.product((False, True), repeat=min(len(file.pending), 4)):
        some = [op for op, happens in zip(file.pending, chosen, strict=False) if happens]
        whole = apply(file.durable, some)
        for cut in range(0, len(whole), SECTOR):
            found += [whole[:cut], whole[:cut].ljust(len(whole), b"\0"), bytes(cut) + whole[cut:]]
        found.append(whole)
    return list(dict.fromkeys([*found, apply(file.durable, file.pending)]))


def subsets(count: int, chance: random.Random) -> list[list[bool]]:
    """Of changes that may have happened: none first, all last; all of them up to seven changes."""
    if count <= 7:
        return [list(chosen) for chosen in itertools.product((False, True), repeat=count)]
    none, everything = [False] * count, [True] * count
    prefixes = [[i < n for i in range(count)] for n in range(1, count)]
    missing = [[i != n for i in range(count)] for n in range(count)]
    by_chance = [[chance.random() < 0.5 for _ in range(count)] for _ in range(64)]
    return [none, *prefixes, *missing, *by_chance, everything]


def lay_out(tree: Tree, path: Path) -> None:
    """Make `path` hold `tree`, and nothing else."""
    path.mkdir(parents=True, exist_ok=True)
    for name, node in tree.items():
        if isinstance(node, bytes):
            (path / name).write_bytes(node)
        else:
            lay_out(node, path / name)
