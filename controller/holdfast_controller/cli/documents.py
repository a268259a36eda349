"""Documents as JSON or YAML on standard output, for programs and for `submit`."""

from __future__ import annotations

import json
from typing import Any

import typer


def print_document(document: Any, output: str) -> None:
    """Print as `json` or `yaml`."""
    if output == "json":
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    if output != "yaml":
        raise typer.BadParameter(f"{output!r} is no output format: json or yaml")
    from ..yaml_text import dump

    typer.echo(dump(document, width=100), nl=False)
