"""Documents as JSON or YAML on standard output, for programs and for `submit`."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import typer


class TextOutput(StrEnum):
    """Of what is told in sentences."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


def print_document(document: Any, output: str) -> None:
    """Print as `json` or `yaml`."""
    if output == "json":
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from ..yaml_text import dump

    typer.echo(dump(document, width=100), nl=False)
