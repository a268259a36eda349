"""`python -m holdfast_trainer explain`: what can be set, what it means, and its default."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence

from .reference import Section, Setting, matching, sections

EPILOG = """examples:
  python -m holdfast_trainer explain                    # all settings
  python -m holdfast_trainer explain train              # those of one section
  python -m holdfast_trainer explain train.precision    # one of them

A file has them as sections with keys, a command line as section.key=value.
"""
WIDEST = 110


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 2 for what is no setting."""
    parser = argparse.ArgumentParser(
        "python -m holdfast_trainer explain",
        description="Show the settings of a training: what each takes, its default and what it means.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("key", nargs="?", help="a section or a setting (default: all)")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    arguments = parser.parse_args(argv)
    found = list(sections()) if arguments.key is None else matching(arguments.key)
    if not found:
        print(f"error: {arguments.key!r} is no setting{_near(arguments.key)}", file=sys.stderr)
        return 2
    if arguments.output == "json":
        told = [dataclasses.asdict(setting) for section in found for setting in section.settings]
        print(json.dumps(told, indent=2))
    else:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        print("\n\n".join(_text(section, width) for section in found))
    return 0


def _near(key: str) -> str:
    known = [name for section in sections() for name in (section.key, *(s.key for s in section.settings))]
    last = {name.rpartition(".")[2]: name for name in known}  # `precision` is meant for `train.precision`
    near = last.get(key) or next(iter(difflib.get_close_matches(key, known, n=1)), None)
    return f"; did you mean {near}?" if near else "; without a name all of them are shown"


def _text(section: Section, width: int) -> str:
    head = textwrap.fill(f"{section.key}: {section.meaning}", width, break_on_hyphens=False)
    return "\n".join([head, *(_setting(setting, width) for setting in section.settings)])


def _setting(setting: Setting, width: int) -> str:
    default = "required" if setting.default is None else f"default {setting.default or 'empty'}"
    lines = [f"  {setting.key}  ({setting.takes}; {default})"]
    if setting.meaning:
        indent = " " * 6
        lines += textwrap.wrap(
            setting.meaning, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    return "\n".join(lines)
