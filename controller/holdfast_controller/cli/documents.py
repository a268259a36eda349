"""Documents as JSON or YAML on standard output, for programs and for `submit`."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Any

import typer


class TextOutput(StrEnum):
    """Of what is told in sentences."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


def camel(name: str) -> str:
    """A key as all documents write it: `lostSteps` of `lost_steps`."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def print_document(document: Any, output: str) -> None:
    """Print as `json` or `yaml`. What the output's encoding may not have is escaped as these escape it: as a
    stream would do it, it were another text, or none that can be read."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    if output == "json":
        typer.echo(json.dumps(document, indent=2, ensure_ascii=not unicode))
        return
    from ..yaml_text import dump

    typer.echo(dump(document, width=100, unicode=unicode), nl=False)
