"""`python -m holdfast_trainer diagnose`: what a run would meet, before it is started.

A few real steps are done with the configured model on real data, and thrown away: nothing is resumed and
nothing saved. Disk speed is measured by one file that is removed again. Under torchrun the ranks measure
what lies between them too. Exit status: 0, 1 where a finding is an error, no step could be done or the disk
not be written, 78 where the configuration cannot be used at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import contract
from .config import ConfigError, check_world, load
from .gpu_words import add_gpus
from .importing import without_collector
from .target_words import add_target_words, is_workload, target_of

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
    if "://" in arguments.run_dir and not arguments.gpu_memory:
        print(
            f"error: --run-dir {arguments.run_dir}: diagnose measures a directory's disk, and no object "
            "store: leave it out, and take what it says of a checkpoint for what the disk here would need",
            file=sys.stderr,
        )
        return contract.EXIT_CONFIG_ERROR
    # PyTorch takes seconds to import: only after what needs none.
    if arguments.gpu_memory:
        with without_collector():
            from .gpu_advice import advise
        return advise(target, overrides, arguments)
    if is_workload(target):
        with without_collector():
            from .tune.diagnose import diagnose_workload
        return diagnose_workload(target, Path(arguments.run_dir), arguments.steps, arguments.output)
    try:
        config = load(Path(target), overrides)
        check_world(config, int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR
    with without_collector():
        from .diagnose_config import diagnose_config
    return diagnose_config(config, Path(arguments.run_dir), arguments.steps, arguments.output)
