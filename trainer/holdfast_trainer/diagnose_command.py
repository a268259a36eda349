"""`python -m holdfast_trainer diagnose`: what a run would meet, before it is started.

A few real steps are done with the configured model on real data, and thrown away: nothing is resumed and
nothing saved. Disk speed is measured by one file that is removed again. Under torchrun the ranks measure
what lies between them too. Exit status: 0, 1 where a finding is an error, no step could be done or the disk
not be written, 78 where the configuration cannot be used at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import contract
from .config import Config, ConfigError, check_world, load
from .diagnosis import Facts, Finding, estimate, findings
from .gpu_advice import add_gpus, advise, settings_line
from .memory_need import Need, memory_need
from .run_facts import checkpoint_line, network_lines, time_line
from .sizes import size_text
from .target_words import add_target_words, is_workload, target_of
from .token_index import DataError
from .tune.diagnose import diagnose_workload

EPILOG = """examples:
  python -m holdfast_trainer diagnose gpt.yaml
  python -m holdfast_trainer diagnose gpt.yaml train.micro_batch=8 -o json
  torchrun --nproc-per-node=2 -m holdfast_trainer diagnose gpt.yaml --run-dir runs/a
  python -m holdfast_trainer diagnose gpt.yaml --gpu-memory 24 --gpu-memory 80 --gpus 4    # GPUs not here
  python -m holdfast_trainer diagnose mine.py:make       # a model of your own, see tune/workload.py
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m holdfast_trainer diagnose",
        description="Measure a few steps of a configuration and say what to change before it runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_target_words(parser, "what to look at")
    parser.add_argument("--run-dir", default="", help="whose disk to measure (default: here)")
    parser.add_argument(
        "--steps", type=int, default=5, metavar="N", help="steps to time at least (%(default)s)"
    )
    add_gpus(parser)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="(%(default)s)")
    arguments = parser.parse_intermixed_args(argv)
    target, overrides = target_of(parser, arguments)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1 is needed")
    if arguments.gpu_memory and is_workload(target):
        parser.error(
            f"--gpu-memory reckons from a configuration: what {target} needs is measured where it runs"
        )
    if arguments.gpu_memory:
        return advise(target, overrides, arguments)
    if "://" in arguments.run_dir:
        print(
            f"error: --run-dir {arguments.run_dir}: diagnose measures a directory's disk, and no object "
            "store: leave it out, and take what it says of a checkpoint for what the disk here would need",
            file=sys.stderr,
        )
        return contract.EXIT_CONFIG_ERROR
    if is_workload(target):
        return diagnose_workload(target, Path(arguments.run_dir), arguments.steps, arguments.output)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        config = load(Path(target), overrides)
        check_world(config, world_size)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR
    from .probing import CannotMeasure, probe  # torch, after what needs none

    try:
        facts = probe(config, Path(arguments.run_dir), steps=arguments.steps)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR
    except CannotMeasure as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if world_size > 1:
            os._exit(1)  # the interpreter's end could wait for what other ranks never send
        return 1
    if facts is None:  # rank 0 tells for all
        return 0
    found = findings(config, facts)
    print(as_json(config, facts, found) if arguments.output == "json" else as_text(config, facts, found))
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
