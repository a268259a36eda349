"""Every setting of the configuration, told from the schema itself: so it cannot tell of others.

What a key takes and its limits are its annotation, its default is its default, and what it means is the text
that stands under it in the source, which Python keeps nowhere else.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from .config import Config
from .schema import SCALARS, Range


@dataclass(frozen=True)
class Setting:
    """One key."""

    key: str
    """Dotted, as an override names it."""
    takes: str
    default: str | None
    """As YAML and overrides write it; None where the key is required."""
    meaning: str


@dataclass(frozen=True)
class Section:
    """The keys that stand together under one."""

    key: str
    meaning: str
    settings: tuple[Setting, ...]


def sections(cls: type = Config, path: str = "", meaning: str = "") -> Iterator[Section]:
    """Those of a schema, outer ones first, in the order of the source."""
    hints = typing.get_type_hints(cls, include_extras=True)
    told = _told(cls)
    settings, inner = [], []
    for field in dataclasses.fields(cls):
        key = f"{path}.{field.name}" if path else field.name
        if (section := _section(hints[field.name])) is not None:
            inner.append((section, key, told.get(field.name) or inspect.getdoc(section) or ""))
        else:
            meant = told.get(field.name, "")
            settings.append(Setting(key, _takes(hints[field.name]), _default(field), meant))
    if settings:
        yield Section(path, _plain(meaning), tuple(settings))
    for section, key, text in inner:
        yield from sections(section, key, text)


def matching(key: str) -> list[Section]:
    """The section of that name with those in it, or the one setting; none where there is neither."""
    found = []
    for section in sections():
        if f"{section.key}.".startswith(f"{key}."):
            found.append(section)
        elif chosen := tuple(setting for setting in section.settings if setting.key == key):
            found.append(dataclasses.replace(section, settings=chosen))
    return found


def _told(cls: type) -> dict[str, str]:
    """By field, the text under it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    told = {}
    for line, below in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            told[line.target.id] = _plain(str(below.value.value))
    return told


def _plain(text: str) -> str:
    return " ".join(text.split())


def _section(hint: Any) -> type | None:
    """The schema that a key holds, where it holds one."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    schemas = (o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o))
    return next(schemas, None)


def _takes(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [_within(limit) for limit in args[1:] if isinstance(limit, Range)]
        return ", ".join([_takes(args[0]), *filter(None, limits)])
    if origin in (Union, types.UnionType):
        return " or ".join(_takes(option) for option in args if option is not types.NoneType)
    if origin is Literal:
        return ", ".join(str(choice) for choice in args)
    if origin is tuple:
        return f"a list, each {_takes(args[0])}"
    return SCALARS[hint]


def _within(limits: Range) -> str:
    """In words; none for a limit of 64 bits, which nobody meets."""
    told = [limits.lowest] if limits.low is not None else []
    if limits.high is not None and limits.high < 2**63:
        told.append(limits.highest)
    return " and ".join(told)


def _default(field: dataclasses.Field[Any]) -> str | None:
    if field.default is dataclasses.MISSING:
        return None
    return field.default if isinstance(field.default, str) else json.dumps(field.default)
