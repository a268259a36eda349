"""`python -m holdfast_trainer tune`: measures what each setting buys, and writes the settings to use.

Alone or under torchrun; the run directory is not touched. What is measured is written at the end, and when
it is interrupted (Ctrl-C). Exit status: 0, 1 where nothing could be measured, 78 where the configuration
cannot be used at all, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from .. import contract
from ..config import Config, ConfigError, check_world, load
from ..contract import exists, is_directory
from ..importing import without_collector
from ..schema import place_given
from ..target_words import add_target_words, is_workload, target_of
from ..token_index import DataError

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and torchrun's way of passing it on."""

EPILOG = """examples:
  python -m holdfast_trainer tune gpt.yaml
  python -m holdfast_trainer tune gpt.yaml --grow --out tuned/
  torchrun --nproc-per-node=2 -m holdfast_trainer tune gpt.yaml train.global_batch=64
  python -m holdfast_trainer tune mine.py:make          # a model of your own, see tune/workload.py

Without --grow a step takes as many samples as today: the training is the same, only faster. With it the
learning rate is rescaled by a rule, which is said.
"""


def main(argv: Sequence[str]) -> int:
    arguments = _arguments(argv)
    interrupt = Interrupt()
    before = {number: signal.signal(number, interrupt) for number in INTERRUPTS}
    hook, sys.unraisablehook = sys.unraisablehook, interrupt.unheard
    try:
        return _main(arguments, interrupt)
    except KeyboardInterrupt:
        print("interrupted before anything was measured; nothing was written", file=sys.stderr)
        return 130
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupt:
    """Ends what is going on, once. What Python raises it in may let nothing out, such as what it calls around
    a fork, or a destructor: so it is remembered, and asked for before each measurement."""

    def __init__(self) -> None:
        self._came = False
        self._of = os.getpid()

    def __call__(self, number: int, *_: object) -> None:
        if os.getpid() != self._of:  # a loader's worker, which ends as its parent wants it to
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        _no_more_interrupts()  # under torchrun both come, and the second would meet what the first began
        self._came = True
        raise KeyboardInterrupt

    def unheard(self, unraisable: Any) -> None:
        """In place of `sys.unraisablehook`: where it is remembered, its traceback tells nobody anything, nor
        does that of a destructor which misses what its constructor did not come to, as DataLoader's."""
        destructor = getattr(unraisable.object, "__name__", "") == "__del__"
        half_made = destructor and unraisable.exc_type is AttributeError
        if not (self._came and (half_made or unraisable.exc_type is KeyboardInterrupt)):
            sys.__unraisablehook__(unraisable)

    def check(self) -> None:
        """Raises KeyboardInterrupt where it came."""
        if self._came:
            raise KeyboardInterrupt


def _no_more_interrupts() -> None:
    for number in INTERRUPTS:
        signal.signal(number, lambda *_: None)  # SIG_IGN has Python complain of one that has come already


def _main(arguments: argparse.Namespace, interrupt: Interrupt) -> int:
    try:
        if os.environ.get("RANK", "0") == "0":
            _require_writable(arguments.out)
        config = None
        if not is_workload(arguments.target):
            config = load(Path(arguments.target), arguments.overrides)
            check_world(config, int(os.environ.get("WORLD_SIZE", "1")))
        with without_collector():
            from ..parallel import join_gang  # PyTorch, after what needs none

        gang = join_gang()
        try:
            return _tune(arguments, config, gang, interrupt)
        finally:
            gang.leave()
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR


def _require_writable(out: Path) -> None:
    """Raises ConfigError where it cannot be made and written to: not once hours were measured."""
    place = out.absolute()
    try:
        while not exists(place):
            place = place.parent
        if is_directory(place) and os.access(place, os.W_OK | os.X_OK):
            return
        why = f"{place} {'may not be written to' if is_directory(place) else 'is no directory'}"
    except OSError as error:
        why = str(error)
    raise ConfigError(f"--out {out}: {why}, and what is measured is to be written there; name another place")


def _tune(arguments: argparse.Namespace, config: Config | None, gang: Any, interrupt: Interrupt) -> int:
    from . import report
    from .gpt import with_settings
    from .measure import Effort
    from .session import Options, Session

    subject = gpt_subject(config, gang) if config is not None else own_subject(arguments.target, gang)
    began = time.monotonic()

    def heard(text: str) -> None:
        if gang.rank == 0:
            print(f"{time.monotonic() - began:6.0f} s  {text}", file=sys.stderr, flush=True)

    effort = Effort(arguments.steps, arguments.seconds)
    options = Options(effort, arguments.rounds, not arguments.no_compile, arguments.grow)
    session = Session(subject, gang, options, heard, interrupt.check)
    found = session.run()
    _no_more_interrupts()  # what is left takes a second or two, and hours may have been measured
    if gang.rank:
        return 0
    chosen = found.chosen
    body: dict[str, Any] | None = None
    if chosen is not None:
        body = dataclasses.asdict(chosen.settings)
        if config is not None:
            tuned = with_settings(config, chosen.settings, gang.world_size)
            if chosen.settings.precision == subject.settings.precision:
                # As it was given, be it auto: a run that was begun with the one goes on with the other.
                tuned = replace(tuned, train=replace(tuned.train, precision=config.train.precision))
            body = _plain(dataclasses.asdict(tuned))
        growth = chosen.settings.samples / subject.settings.samples
        if growth > 1:
            how = "its square root" if subject.rule == "sqrt" else "the same factor"
            found.notes.append(
                f"learning rate: a step takes {growth:g} times the samples, so the rate grows by {how}, "
                f"from {subject.learning_rate:g} to {chosen.settings.learning_rate:g}"
            )
    told = report.as_json if arguments.output == "json" else report.as_text
    print(told(found, subject.unit), flush=True)
    try:
        files = report.write(found, subject.unit, arguments.out, body)
    except OSError as error:
        print(f"error: --out {arguments.out}: not all of it could be written: {error}", file=sys.stderr)
        return 1
    heard(f"written: {', '.join(map(str, files))}")
    if found.interrupted:
        return 130
    return 0 if chosen is not None else 1


def gpt_subject(config: Config, gang: Any) -> Any:
    """The configured training. Raises ConfigError, DataError."""
    from ..assembly import Batches
    from ..data import TokenDataset
    from ..footprint import Footprint
    from ..precision import precision
    from ..probing import warn_beforehand
    from .gpt import GptTrial, settings_of
    from .session import Subject

    if config.train.parallel == "fsdp" and gang.world_size > 1:
        raise ConfigError(
            "train.parallel: fsdp cannot be tuned, as ranks whose memory ends would wait for each other; "
            "tune with train.parallel=ddp on a smaller model.layers"
        )
    shape = {"context": config.model.context, "vocab_size": config.model.vocab_size}
    data = TokenDataset(config.data.prepared, "train", **shape, verify=config.data.verify)
    compute = precision(config.train.precision, gang.device, gang)
    batches = Batches(data, config, gang.rank, gang.world_size, gang.device)
    warn_beforehand(batches, compute.name, Footprint(gang.device).room())
    return Subject(
        build=lambda settings, alone: GptTrial(config, data, settings, gang, alone=alone),
        settings=settings_of(config, compute.name, gang),
        unit="tokens",
        per_sample=config.model.context,
        learning_rate=config.optim.learning_rate,
        rule="sqrt",
        has_workers=False,
        can_recompute=True,
        samples=data.samples,
        repeats="strict",
    )


def own_subject(target: str, gang: Any) -> Any:
    """A user's own training. Raises ConfigError."""
    import torch

    from .own import OwnTrial
    from .session import Subject
    from .workload import load_workload

    workload = load_workload(target)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), False)
    rule = "linear" if isinstance(optimizer, torch.optim.SGD) else "sqrt"
    return Subject(
        build=lambda settings, alone: OwnTrial(workload, settings, gang, alone=alone),
        settings=workload.settings,
        unit=workload.unit,
        per_sample=None if workload.work else 1.0,
        learning_rate=workload.settings.learning_rate or float(optimizer.param_groups[0]["lr"]),
        rule=cast(Literal["sqrt", "linear"], rule),
        has_workers=True,
        can_recompute=False,
        samples=len(workload.dataset),  # type: ignore[arg-type]
    )


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m holdfast_trainer tune",
        description="Measure what each optimisation buys here, alone and together, and write what to use.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_target_words(parser, "what to tune")
    parser.add_argument(
        "--out", type=place_given, default=Path("tune"), help="directory for results (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="times to measure the table (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="steps a row has at least (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="seconds a row takes at least (%(default)s)"
    )
    parser.add_argument("--grow", action="store_true", help="allow a step to take more samples than now")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="(%(default)s)")
    arguments = parser.parse_intermixed_args(argv)
    arguments.target, arguments.overrides = target_of(parser, arguments)
    if not 0 <= arguments.seconds < math.inf:
        parser.error(f"--seconds {arguments.seconds:g}: a number from 0 on is needed")
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error(f"--rounds {arguments.rounds} --steps {arguments.steps}: at least 1 is needed")
    return arguments


def _plain(value: Any) -> Any:
    """For YAML: no paths, nothing that is not set."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return str(value) if isinstance(value, Path) else value
