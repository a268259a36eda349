"""`diagnose` for a workload of one's own: what a few steps of it say, costliest first."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import contract
from ..run_facts import checkpoint_line, network_lines, time_line
from ..schema import ConfigError
from ..sizes import size_text

if TYPE_CHECKING:
    from .diagnosis import Explained, WorkloadFacts


def diagnose_workload(target: str, directory: Path, steps: int, output: str) -> int:
    """Measures and tells; returns the exit status."""
    from ..parallel import join_gang  # torch, after what needs none
    from ..probing import CannotMeasure
    from .diagnosis import explain
    from .measure import Effort
    from .probing import probe_workload
    from .workload import load_workload

    try:
        workload = load_workload(target)
        gang = join_gang()
        try:
            facts = probe_workload(workload, directory, gang, Effort(steps, 0.0))
            first = gang.rank == 0
        finally:
            gang.leave()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR
    except CannotMeasure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if first:
        found = explain(facts)
        print(as_json(facts, found) if output == "json" else as_text(facts, found))
    return 0


def as_json(facts: WorkloadFacts, found: Sequence[Explained]) -> str:
    body = {
        "facts": {**dataclasses.asdict(facts), "save_seconds": facts.save_seconds},
        "estimated_seconds": facts.estimated_seconds,
        "findings": [dataclasses.asdict(one) for one in found],
    }
    return json.dumps(body, indent=2)


def as_text(facts: WorkloadFacts, found: Sequence[Explained]) -> str:
    times = facts.times
    parts = ", ".join(f"{name} {seconds / times.seconds:.0%}" for name, seconds in vars(times).items())
    lines = [
        f"settings    {facts.settings.told()}",
        f"device      {facts.device_type}, {facts.ranks_here} rank(s) here, {facts.cores} cores",
        f"memory      {size_text(facts.memory)} measured of {size_text(facts.room)} that a rank may take",
        f"step        {1e3 * times.seconds:,.1f} ms, {facts.samples_per_second:,.1f} samples/s: {parts}",
        f"operations  {facts.operations:,} in a forward pass, {facts.operations_of_one:,} more a sample",
        *([f"attention   {facts.attention}"] if facts.attention else []),
        *_kernels(facts),
        checkpoint_line(facts),
        *network_lines(facts),
        _time(facts),
        "",
    ]
    return "\n".join([*lines, *(f"{one.cause}: {one.message}" for one in found)])


def _kernels(facts: WorkloadFacts) -> list[str]:
    names = ", ".join(facts.not_deterministic)
    return [f"kernels     none is deterministic for {names}: a resume may not be bit-exact"] if names else []


def _time(facts: WorkloadFacts) -> str:
    if facts.steps is None or facts.estimated_seconds is None:
        return "time        not estimated: Workload(steps=...) would say how many steps there are"
    return time_line(facts.estimated_seconds, facts.steps)
