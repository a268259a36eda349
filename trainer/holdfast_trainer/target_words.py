"""What a command is about: a configuration file or a function, and settings that win over it."""

from __future__ import annotations

import argparse
import os

from . import contract


def add_target_words(parser: argparse.ArgumentParser, what: str) -> None:
    """`what` begins the help, such as "what to tune"."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG|FILE.py:FUNCTION section.key=value",
        help=f"{what} (default: the file that {contract.ENV_CONFIG} names), and what wins over it",
    )


def is_workload(target: str) -> bool:
    """Whether this names a function and not a configuration."""
    return ":" in target and not target.endswith((".yaml", ".yml"))


def target_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """(target, overrides). Ends the command where it is not said which, several are, or a word means nothing
    there."""
    targets = [word for word in arguments.words if "=" not in word]
    if len(targets) > 1:
        parser.error(f"one configuration at a time, not {', '.join(targets)}; values are section.key=value")
    target = targets[0] if targets else os.environ.get(contract.ENV_CONFIG)
    if target is None:
        parser.error(f"give CONFIG (or set {contract.ENV_CONFIG})")
    overrides = [word for word in arguments.words if "=" in word]
    if target.endswith(".py"):
        parser.error(f"{target}: name its function, too, such as {target}:make")
    if overrides and is_workload(target):
        parser.error(f"{overrides[0]}: a function's settings are those of its Workload; change them there")
    return target, overrides
