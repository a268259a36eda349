"""The composition root: which store, which engine, and the command that starts them. Only wires."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cli.up import Voice
    from .settings import ClusterSettings, Settings


def main() -> None:
    """The `holdfast` command."""
    _collect_little()
    _open_closed_streams()
    _write_any_text()
    try:
        _commands()()
    except KeyboardInterrupt:  # before there is a command that hears it
        sys.exit(128 + signal.SIGINT)


def _commands() -> Callable[[], None]:
    try:
        from .cli import create_cli
    except ModuleNotFoundError as error:
        sys.exit(_not_installed(error))
    return create_cli(run_controller, run_on_cluster)


def _not_installed(error: ModuleNotFoundError) -> str:
    """What is missing, and what installs it. Raises `error` again where it is a part of Holdfast itself."""
    package = (error.name or "").partition(".")[0]
    if package.startswith("holdfast_"):
        raise error
    return (
        f"holdfast needs {package}, which is not installed for {sys.executable}: "
        "pip install 'holdfast[controller]'"
    )


def _open_closed_streams() -> None:
    """A standard stream that was closed (`<&-`, `>&-`) leads nowhere from now on: Python has None for it, and
    the next file that is opened, such as the job store, would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # stays open


def _write_any_text() -> None:
    """What the terminal's encoding (LC_ALL=de_DE, PYTHONIOENCODING=ascii) has no character for is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _start_logging(settings: Settings | ClusterSettings) -> None:
    from .logs import configure_logging
    from .settings import unknown_names

    log = configure_logging(settings.log_level, settings.log_format)
    for sentence in unknown_names(os.environ):
        log.warning(sentence)


def _collect_little() -> None:
    """A command imports much, which stays, and ends soon: to look for garbage in that, and in all of it once
    more at the end, was a sixth of its CPU time. One that runs on collects after all: `_collect_less`."""
    gc.set_threshold(100_000, 20, 10)
    atexit.register(gc.freeze)


def _collect_less() -> None:
    """Once all is imported: that is not looked at for garbage, and the rest less often than Python would.

    A pass holds up every request and every job. With 1,500 jobs on a cluster (`make bench-controller`, on two
    cores of an Intel Xeon) the longest took 185 ms and takes 46, and all together 2.6 s of 30 s of CPU time,
    now 1.1.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)


def run_on_cluster(settings: ClusterSettings) -> None:
    """Run the controller of a Kubernetes cluster until it is asked to end."""
    from .on_cluster import run

    _collect_less()
    _start_logging(settings)
    asyncio.run(run(settings))


def run_controller(settings: Settings, stop_jobs: bool, voice: Voice) -> None:
    """Run the controller with the local engine in this process until it is asked to end."""
    _start_logging(settings)
    asyncio.run(_run(settings, stop_jobs, voice))


async def _run(settings: Settings, stop_jobs: bool, voice: Voice) -> None:
    from .api import create_app
    from .clock import ClockWatch
    from .gpu_local import watching
    from .local.engine import LocalEngine
    from .local.launch import Runtime
    from .local.slots import Machine
    from .local.store import LocalStore
    from .metrics import Metrics
    from .reconciler import Reconciler
    from .server import Background, Controller, claim, serve, signals_set
    from .stopping import active_jobs, suspend_all

    _collect_less()
    asked_to_end, closing = asyncio.Event(), asyncio.Event()
    async with signals_set(asked_to_end):
        with claim(settings) as listening, contextlib.ExitStack() as watched:
            store = await LocalStore.open(listening.directory.database)
            try:
                engine = LocalEngine(
                    settings.data_dir,
                    Machine(settings.cpu_slots, settings.devices),
                    runtime=Runtime.of_this_process(settings.log_limit),
                    prices=settings.prices,
                )
                engine.tell_of_strangers({job.metadata.uid for job in await store.list_jobs()})
                metrics = Metrics(engine.slots)
                watch = watching(bool(settings.devices), engine.gpus_held, settings.gpu_look_seconds)
                gpus = watched.enter_context(watch)
                reconciler = Reconciler(store, engine, metrics=metrics, gpus=gpus, watch=ClockWatch())
                background = Background(engine=engine.run, reconciler=reconciler.run)

                async def before_exit() -> None:
                    if stop_jobs:
                        voice.suspending()
                        await suspend_all(store)

                app = create_app(
                    store,
                    engine,
                    token=listening.token,
                    series=metrics.text,
                    reconciler_fault=lambda: background.fault,
                    closing=closing,
                )
                controller = Controller(app, closing, background.run, before_exit)
                await serve(
                    controller, listening.socket, lambda: voice.started(settings, listening), asked_to_end
                )
                voice.ended(await active_jobs(store))
            finally:
                await store.close()


if __name__ == "__main__":
    main()
