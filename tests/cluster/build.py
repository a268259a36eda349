"""Build each program once: `python -m tests.cluster.build [PROGRAM ...]`.

Programs lie in the cache under a key of their sources, so a second call finds them and a changed pin
builds anew. A module's programs appear all together: they are built beside their final place, which
then takes their directory by a rename. Two builders of one module wait for each other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.errors import BuildFailed, ClusterError, MissingTool
from tests.cluster.locks import locked
from tests.cluster.site import cache_directory
from tests.cluster.system import find, go
from tests.cluster.tools import MODULES, Module, module_of


def asset(name: str) -> Path | None:
    """The program in the directory that `KUBEBUILDER_ASSETS` names, as envtest looks for it.

    None where that is not set or has it not. Raises MissingTool where it names no directory.
    """
    given = os.environ.get("KUBEBUILDER_ASSETS")
    if not given:
        return None
    if not Path(given).is_dir():
        raise MissingTool(f"KUBEBUILDER_ASSETS={given} is no directory; unset it, or run setup-envtest")
    found = Path(given) / name
    return found if found.exists() else None


def program(name: str, *, assets: bool = False) -> Path:
    """The program, building it where it is missing; with `assets`, envtest's comes first."""
    return (asset(name) if assets else None) or build(module_of(name)) / name


def build(module: Module) -> Path:
    """The directory of the module's programs. Raises BuildFailed with the compiler's words."""
    if module.built.exists():
        return module.built
    with locked(cache_directory() / "bin" / f"{module.key}.lock"):
        if not module.built.exists():
            began = time.monotonic()
            names = ", ".join(module.programs)
            print(f"cluster: building {names} {module.version}".rstrip(), flush=True)
            _build(module)
            print(f"cluster: built {module.name} in {time.monotonic() - began:.0f} s", flush=True)
    return module.built


def carried(module: Module) -> Path:
    """A directory with what the module has in `keep`; nothing is built for it."""
    beside = module.built.with_name(f"{module.key}.kept")
    if module.built.exists() or beside.exists():
        return module.built if module.built.exists() else beside
    with locked(cache_directory() / "bin" / f"{module.key}.lock"):
        if not beside.exists():
            beside.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=beside.parent, prefix=f"{module.key}.") as scratch:
                fetched = Path(scratch) / "kept"
                fetched.mkdir()
                _keep(go(), module, fetched)
                fetched.rename(beside)
    return beside


def _build(module: Module) -> None:
    compiler = go()
    module.built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=module.built.parent, prefix=f"{module.key}.") as scratch:
        beside = Path(scratch) / "bin"
        beside.mkdir()
        for name, package in module.programs.items():
            began = time.monotonic()
            _go(compiler, module, "build", *module.flags, "-o", str(beside / name), package)
            print(f"cluster:   {name} {time.monotonic() - began:.0f} s", flush=True)
        if module.keep:
            _keep(compiler, module, beside)
        beside.rename(module.built)


def _keep(compiler: str, module: Module, target: Path) -> None:
    _go(compiler, module, "mod", "download", module.main)
    source = Path(_go(compiler, module, "list", "-m", "-f", "{{.Dir}}", module.main).strip())
    for directory in module.keep:
        # Files alone: the module cache is read-only, directories too, and a copy must be erasable.
        shutil.copytree(source / directory, target / directory, copy_function=shutil.copyfile)
        for path in [target / directory, *(target / directory).rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def _go(compiler: str, module: Module, *arguments: str) -> str:
    # Without cgo programs are static and run in an image that holds nothing else.
    linked = "1" if module.cgo else "0"
    environment = {**os.environ, "CGO_ENABLED": linked, "GOWORK": "off", "GOFLAGS": "-mod=readonly"}
    niceness = ["nice", "-n", "19"] if find("nice") else []
    done = subprocess.run(
        [*niceness, compiler, *arguments],
        cwd=module.directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildFailed(f"go {arguments[0]} of {module.name} failed\n{done.stderr[-3000:]}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """Build the named programs, or all; print where they are."""
    try:
        wanted = [module_of(name) for name in arguments] or list(MODULES)
    except KeyError as error:
        names = ", ".join(name for module in MODULES for name in module.programs)
        print(f"cluster: nothing builds {error}; there are: {names}", file=sys.stderr)
        return 2
    try:
        for module in (module for module in MODULES if module in wanted):
            directory = build(module)
            for name in module.programs:
                print(directory / name)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
