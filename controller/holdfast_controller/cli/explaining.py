"""`holdfast explain`: what a job can say and what its status says, told by the classes that the CRD is of."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from .documents import TextOutput, print_document

WIDEST = 110
WORDS = {"integer": "an integer", "number": "a number", "boolean": "true or false", "object": "a mapping"}


@dataclass(frozen=True)
class Key:
    """One key of a TrainingJob; a section where others stand under it."""

    key: str
    """Dotted, as --set names it; of a list's items with []."""
    takes: str
    default: str | None
    """As YAML writes it; None where there is none."""
    required: bool
    meaning: str


def add_to(cli: typer.Typer) -> None:
    cli.command("explain")(explain)


def explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Such as spec, spec.retries, spec.capacity or status.")
    ] = "spec",
    output: Annotated[TextOutput, typer.Option("-o", "--output")] = TextOutput.TEXT,
) -> None:
    """Show the keys of a job: what each takes, its default and its meaning.

    What stands under spec.config is the program's own: for the trainer that comes with Holdfast
    `python -m holdfast_trainer explain` shows it.
    """
    known = list(keys())
    found = [one for one in known if f"{one.key}.".startswith((f"{key}.", f"{key}[]."))]
    if not found:
        raise typer.BadParameter(f"{key!r} is no key of a job{_near(key, known)}", param_hint="'KEY'")
    if output is not TextOutput.TEXT:
        print_document([asdict(one) for one in found], output)
        return
    width = min(shutil.get_terminal_size().columns, WIDEST)
    typer.echo("\n".join(_text(one, width) for one in found))


def keys() -> Iterator[Key]:
    """All of a job but what every Kubernetes object has, a section before what stands under it."""
    from ..jobs import TrainingJob

    schema = TrainingJob.model_json_schema(by_alias=True)
    for name in ("spec", "status"):
        yield from _walk(name, schema["properties"][name], name == "spec", schema["$defs"])


def _walk(key: str, node: Mapping[str, Any], required: bool, types: Mapping[str, Any]) -> Iterator[Key]:
    kind = _resolved(node, types)
    listed = kind.get("type") == "array"
    inner = _resolved(kind["items"], types) if listed else kind
    below: Mapping[str, Any] = inner.get("properties", {})
    takes = "" if below and not listed else _takes(kind, types)
    meaning = node.get("description") or kind.get("description") or inner.get("description") or ""
    yield Key(key, takes, _default(node.get("default")), required, " ".join(meaning.split()))
    for name, one in below.items():
        path = f"{key}{'[]' if listed else ''}.{name}"
        yield from _walk(path, one, name in inner.get("required", ()), types)


def _default(value: Any) -> str | None:
    if value in (None, [], {}):
        return None
    return value if isinstance(value, str) and value else json.dumps(value)


def _resolved(node: Mapping[str, Any], types: Mapping[str, Any]) -> Mapping[str, Any]:
    """What it refers to, or what it is where it is not null."""
    options = [one for one in node.get("anyOf", (node,)) if one.get("type") != "null"]
    chosen: Mapping[str, Any] = options[0] if len(options) == 1 else node
    return types[chosen["$ref"].rpartition("/")[2]] if "$ref" in chosen else chosen


def _takes(kind: Mapping[str, Any], types: Mapping[str, Any]) -> str:
    if "enum" in kind:
        return ", ".join(map(str, kind["enum"]))
    if "anyOf" in kind:
        return " or ".join(_takes(_resolved(one, types), types) for one in kind["anyOf"])
    if kind.get("type") == "array":
        item = _resolved(kind["items"], types)
        return "a list of mappings" if item.get("type") == "object" else f"a list, each {_takes(item, types)}"
    if kind.get("format") == "date-time":
        return "a time"
    limits = (("minimum", "at least"), ("maximum", "at most"))
    said = [f"{words} {kind[name]}" for name, words in limits if name in kind]
    return ", ".join([WORDS.get(kind.get("type", ""), "text"), *said])


def _near(key: str, known: list[Key]) -> str:
    import difflib

    names = [one.key for one in known]
    last = {name.rpartition(".")[2]: name for name in reversed(names)}  # `retries` is meant for spec.retries
    near = last.get(key) or next(iter(difflib.get_close_matches(key, names, n=1)), None)
    return f"; did you mean {near}?" if near else "; spec and status are"


def _text(one: Key, width: int) -> str:
    default = f"default {one.default}" if one.default is not None else "required" if one.required else ""
    said = "; ".join(filter(None, (one.takes, default)))
    depth = "  " * one.key.count(".")
    lines = textwrap.wrap(
        f"{one.key}  ({said})" if said else one.key,
        width,
        initial_indent=depth,
        subsequent_indent=f"{depth}    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    indent = f"{depth}    "
    return "\n".join(
        lines
        + textwrap.wrap(
            one.meaning, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    )
