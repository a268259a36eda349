"""Of which code a run is made: Holdfast's, and the program's that uses it. Standard library only."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path


def own_code(package: Path = Path(__file__).parent) -> str:
    """A digest of Holdfast's own sources. Each of them may have a part in what is computed, and its version
    tells releases apart alone."""
    return _digest((*package.rglob("*.py"), *package.rglob("*.cpp")), package)


def programs_code() -> str:
    """A digest of the program's own sources: its script, or the package that `python -m` was given a module
    of, and what it has imported from beside it or from within it so far. Of what is installed versions tell.
    Empty where there is nothing to read, as at a prompt, and where the program is Holdfast's."""
    main = sys.modules["__main__"]
    script, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if script is None or (spec is not None and spec.name.partition(".")[0] == __package__):
        return ""
    place = Path(os.path.abspath(script))
    around = place.parents[max(0, spec.name.count(".") - 1) if spec is not None else 0]
    try:
        return _digest({place, *_imported_from(around)}, around)
    except OSError:  # taken away since
        return ""


def _digest(files: Iterable[Path], around: Path) -> str:
    """Of their names below `around`, and of what is in them. Raises OSError."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(around)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _imported_from(around: Path) -> Iterator[Path]:
    """Sources below it that are a program's own. There are thousands of modules: most are told by a text."""
    elsewhere = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
    below = os.path.join(around, "")
    for module in list(sys.modules.values()):
        # One that was made, not loaded, may have a name of its own for a file, as torch.ops has "_ops.py".
        file = getattr(module, "__file__", None)
        if not (isinstance(file, str) and file.startswith(below) and file.endswith(".py")):
            continue
        path = Path(file)
        installed = {"site-packages", "dist-packages"} & set(path.relative_to(around).parts)
        if not installed and not any(map(path.is_relative_to, elsewhere)):
            yield path
