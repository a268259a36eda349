"""`diagnose` of a configuration: measured here, and told with what to change. Imports PyTorch."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import contract
from .config import Config, ConfigError
from .diagnosis import Facts, Finding, estimate, findings
from .gpu_advice import settings_line
from .memory_need import Need, memory_need
from .probing import CannotMeasure, probe
from .run_facts import checkpoint_line, network_lines, time_line
from .sizes import size_text
from .token_index import DataError


def diagnose_config(config: Config, directory: Path, steps: int, output: str) -> int:
    """Measures and tells; returns the exit status."""
    try:
        facts = probe(config, directory, steps=steps)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR
    except CannotMeasure as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            os._exit(1)  # the interpreter's end could wait for what other ranks never send
        return 1
    if facts is None:  # rank 0 tells for all
        return 0
    found = findings(config, facts)
    print(as_json(config, facts, found) if output == "json" else as_text(config, facts, found))
    return int(any(finding.level == "error" for finding in found))


def as_json(config: Config, facts: Facts, found: Sequence[Finding]) -> str:
    """One object: facts, need, findings, seconds until the run would be done."""
    body = {
        "facts": {**dataclasses.asdict(facts), "save_seconds": facts.save_seconds},
        "memory_need": dataclasses.asdict(_need(config, facts)),
        "estimated_seconds": estimate(config, facts),
        "findings": [dataclasses.asdict(finding) for finding in found],
    }
    return json.dumps(body, indent=2)


def as_text(config: Config, facts: Facts, found: Sequence[Finding]) -> str:
    """For people."""
    need = _need(config, facts)
    tokens = config.train.global_batch * config.model.context
    lines = [
        f"device      {facts.device}, {facts.precision}, {facts.world_size} rank(s), {facts.cores} cores",
        f"memory      {size_text(facts.memory_peak)} measured of {size_text(facts.memory_total)}; reckoned "
        f"{size_text(need.total)} (state {size_text(need.state)}, activations {size_text(need.activations)}, "
        f"logits {size_text(need.logits)})",
        f"step        {1e3 * facts.step_seconds:,.1f} ms, {tokens / facts.step_seconds:,.0f} tokens/s, "
        f"{facts.data_seconds / facts.step_seconds:.2%} of it data",
        f"attention   {facts.attention}{', a fused loss' if facts.fused_loss else ''}"
        f"{', fused layers' if facts.fused_layers else ''}",
        checkpoint_line(facts),
        f"data        {_data(config, facts.samples)}",
        *network_lines(facts),
        time_line(estimate(config, facts), config.train.steps),
    ]
    if line := settings_line(config, facts, need):
        lines.append(line)
    lines += ["", *(f"{finding.level}: {finding.setting}: {finding.message}" for finding in found)]
    if not found:
        lines.append("nothing to change")
    return "\n".join(lines)


def _data(config: Config, samples: int | None) -> str:
    if samples is None:
        return "streamed and tokenised meanwhile; how much there is, is not known"
    return f"{samples:,} sequences, read {config.train.steps * config.train.global_batch / samples:.2f} times"


def _need(config: Config, facts: Facts) -> Need:
    micro = config.train.micro_batch or config.train.global_batch // facts.world_size
    return memory_need(config, facts.precision, facts.world_size, micro, fused_loss=facts.fused_loss)
