"""Facts for a diagnosis of one's own workload: a few steps with its settings as they are."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..attention import attention_kernels
from ..checkpoint.errors import UnsupportedState
from ..determinism import hear_of_operations, with_kernels
from ..faults import is_out_of_memory
from ..footprint import warm_up
from ..loading import Threads
from ..memory import ranks_here
from ..parallel import Gang
from ..place import process_seconds
from ..precision import Bf16, bf16_of, least, precision
from ..probing import surroundings
from ..samples import to_device
from .census import Line, census
from .diagnosis import WorkloadFacts
from .measure import NO_ROOM, Effort, measure
from .own import OwnTrial, loader
from .settings import ConfigError, Settings
from .workload import Workload


def probe_workload(workload: Workload, directory: Path, gang: Gang, effort: Effort) -> WorkloadFacts:
    """Collective; checkpoints would go to `directory`. Raises ConfigError where its settings cannot be
    measured, CannotMeasure of the disk."""
    with with_kernels(workload.settings.deterministic, gang.device):
        return _probe(workload, directory, gang, effort)


def _probe(workload: Workload, directory: Path, gang: Gang, effort: Effort) -> WorkloadFacts:
    settings = workload.settings
    without: list[str] = []
    hear_of_operations(without.append)
    warm_up(gang.device)
    begun = process_seconds()
    trials: list[OwnTrial] = []

    def build(settings: Settings, alone: bool) -> OwnTrial:
        trials[:] = [OwnTrial(workload, settings, gang, alone=alone)]
        return trials[0]

    threads = Threads()
    threads.look()
    outcome = measure(build, settings, gang, effort)
    crowding = threads.look()
    if outcome.fault or outcome.times is None:
        remedy = "; give a pass a smaller batch, and accumulate" if NO_ROOM in outcome.fault else ""
        raise ConfigError(f"today's settings ({settings.told()}) cannot be measured: {outcome.fault}{remedy}")
    state = _state_bytes(trials.pop())  # and nothing holds its memory any more
    start = begun + outcome.ready_seconds - outcome.times.seconds
    model = workload.model().to(gang.device)
    whole = _operations(workload, settings, model, gang)
    count = sum(line.operations for line in whole)
    of_one = 0.0
    for other in (2 * settings.batch, settings.batch // 2):
        lines = _operations(workload, replace(settings, batch=other), model, gang) if other else []
        if lines:
            of_one = (sum(line.operations for line in lines) - count) / (other - settings.batch)
            break
    return WorkloadFacts(
        settings=settings,
        times=outcome.times,
        samples_per_second=settings.samples * gang.world_size / outcome.times.seconds,
        operations=count,
        lines=whole,
        operations_of_one=max(0, round(of_one)),
        cores=len(os.sched_getaffinity(0)),
        fast_bf16=least(gang.gather(bf16_of(gang.device))) is Bf16.FAST,
        device_type=gang.device.type,
        ranks_here=ranks_here(),
        attention=_attention(workload, settings, model, gang),
        memory=outcome.memory,
        room=outcome.room,
        steps=workload.steps,
        not_deterministic=without,
        **vars(surroundings(gang, directory, state, start, crowding)),
    )


def _state_bytes(trial: OwnTrial) -> int:
    """After its steps: before the first one an optimizer keeps nothing."""
    try:
        return trial.state_bytes()
    except UnsupportedState as error:
        raise ConfigError(f"no checkpoint could be saved of it: {error}") from error


def _attention(workload: Workload, settings: Settings, model: nn.Module, gang: Gang) -> str:
    """In a training step's forward pass: its gradients and its precision decide, too."""
    batch = to_device(
        next(iter(loader(workload, replace(settings, workers=0), gang, alone=True))), gang.device
    )
    with precision(settings.precision, gang.device).autocast():
        return attention_kernels(lambda: workload.loss(model, batch))


def _operations(workload: Workload, settings: Settings, model: nn.Module, gang: Gang) -> list[Line]:
    """Of a forward pass with such a batch; none where there are too few samples, or no memory, for it."""
    batches = iter(loader(workload, replace(settings, workers=0), gang, alone=True))
    try:
        batch = to_device(next(batches), gang.device)
        with torch.no_grad():
            return census(lambda: workload.loss(model, batch))
    except StopIteration:
        return []
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return []
