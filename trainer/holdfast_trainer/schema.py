"""YAML to frozen dataclasses, with errors that say where and what instead.

A schema is a plain dataclass: its annotations are the types, `Annotated[int, Range(1)]` adds limits,
`Literal` names the choices, a field without a default is required. `from_mapping` walks schema and
document together and gathers every fault before it raises, so one run shows all that is wrong.

YAML is read as version 1.2 where version 1.1 (PyYAML) surprises people: `6e-4` is a number, not a string,
and `1:30` is text, not the 90 that it comes to by sixties. `0100`, which is 64 in one and 100 in the other,
is an error, and so is a key written twice, instead of a silent win for the last.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

T = TypeVar("T")


class ConfigError(ValueError):
    """The configuration can not be used as written. `errors` holds one line per fault."""

    def __init__(self, errors: Sequence[str] | str):
        self.errors = (errors,) if isinstance(errors, str) else tuple(errors)
        super().__init__("\n".join(self.errors))


@dataclass(frozen=True)
class Range:
    """Limits of a number, both included unless `open_low`; None is no limit."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    @property
    def lowest(self) -> str:
        """In words."""
        return f"{'above' if self.open_low else 'at least'} {self.low}"

    @property
    def highest(self) -> str:
        """In words."""
        return f"{'below' if self.open_high else 'at most'} {self.high}"

    def fault(self, value: float) -> str | None:
        """What is wrong with `value`, or None."""
        if self.low is not None and (value <= self.low if self.open_low else value < self.low):
            return f"must be {self.lowest}"
        if self.high is not None and (value >= self.high if self.open_high else value > self.high):
            return f"must be {self.highest}"
        return None


Positive = Annotated[int, Range(1)]
LARGEST_BITS = 128
"""Of an integer."""
SCALARS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
"""What a key takes, in words."""


def from_mapping(
    cls: type[T], mapping: object, where: str | Path, *, places: Mapping[str, str] | None = None
) -> T:
    """Build the dataclass `cls` from a mapping of plain values (as YAML or JSON gives them).

    `where` names the document in messages; `places` may give a more exact place for a dotted key.
    Raises ConfigError with every unknown key, missing key, wrong type and value out of range, and
    with whatever ValueError the `__post_init__` of `cls` or of a section raises.
    """
    walk = _Walk(str(where), places or {})
    value = walk.dataclass(cls, mapping, "")
    if walk.errors:
        raise ConfigError(walk.errors)
    return typing.cast("T", value)


def place_of(text: str | Path) -> Path:
    """The path that a person writes: `~` is the home, also where no shell has put that in its place, as in a
    file, a script or `--out=~/data`."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # there is no such user
        return Path(text)


def word_given(text: str) -> str:
    """For argparse: a word that names something. Where it is empty, the current directory or a default would
    be taken, which nobody named."""
    if not text:
        raise ArgumentTypeError("it is empty, as of a variable that is not set")
    return text


def place_given(text: str) -> Path:
    """As `place_of`, of a word that is not empty."""
    return place_of(word_given(text))


_FAULTY = object()
"""Stands for a value whose fault is already in the list."""


class _Walk:
    """One pass over schema and document; collects faults instead of stopping at the first."""

    def __init__(self, where: str, places: Mapping[str, str]):
        self.where, self.places = where, places
        self.errors: list[str] = []

    def fail(self, key: str, message: str) -> object:
        place = self.places.get(key)
        parent = key
        while place is None and "." in parent:
            parent = parent.rpartition(".")[0]
            place = self.places.get(parent)
        self.errors.append(f"{place or self.where}: {key + ': ' if key else ''}{message}")
        return _FAULTY

    def dataclass(self, cls: Any, value: object, path: str) -> object:
        if not isinstance(value, Mapping):
            return self.fail(path, f"expected a mapping of {cls.__name__} keys, found {_show(value)}")
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        hints = typing.get_type_hints(cls, include_extras=True)
        before = len(self.errors)
        for key in value:
            if key not in fields:
                self.fail(_join(path, key), f"unknown key{_nearest(str(key), list(fields))}")
        found: dict[str, object] = {}
        for name, field in fields.items():
            if name in value:
                found[name] = self.value(hints[name], value[name], _join(path, name))
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.fail(_join(path, name), f"required, but missing (expected {_describe(hints[name])})")
        if len(self.errors) > before:
            return _FAULTY
        try:
            return cls(**found)
        except ConfigError as error:
            for line in error.errors:
                self.fail(*_split_key(line, path, fields))
            return _FAULTY
        except ValueError as error:
            return self.fail(path, str(error))

    def value(self, hint: Any, value: object, path: str) -> object:
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._annotated(args, value, path)
        if origin in (Union, types.UnionType):
            return self._union(hint, args, value, path)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self.dataclass(hint, value, path)
        if origin in (list, tuple) and isinstance(value, (list, tuple)):
            items = [self.value(args[0], item, f"{path}[{i}]") for i, item in enumerate(value)]
            return items if origin is list else tuple(items)
        if origin is dict and isinstance(value, Mapping):
            return {key: self.value(args[1], item, _join(path, key)) for key, item in value.items()}
        if origin is Literal:
            if any(value == choice and type(value) is type(choice) for choice in args):
                return value
            near = _near(str(value), [str(c) for c in args])
            return self.fail(path, f"{_show(value)} is not one of {_describe(hint)}{near}")
        return self._scalar(hint, value, path)

    def _annotated(self, args: tuple[Any, ...], value: object, path: str) -> object:
        result = self.value(args[0], value, path)
        for limit in args[1:]:
            if isinstance(limit, Range) and isinstance(result, (int, float)):
                fault = limit.fault(result)
                if fault:
                    return self.fail(path, f"{fault}, found {_show(value)}")
        return result

    def _union(self, hint: Any, args: tuple[Any, ...], value: object, path: str) -> object:
        for option in args:
            attempt = _Walk(self.where, self.places)
            result = attempt.value(option, value, path)
            if not attempt.errors:
                return result
        options = [a for a in args if a is not type(None)]
        if value is not None and len(options) == 1:
            return self.value(options[0], value, path)
        return self.fail(path, f"expected {_describe(hint)}, found {_show(value)}")

    def _scalar(self, hint: Any, value: object, path: str) -> object:
        if hint is Any:
            return value
        if hint is type(None) and value is None:
            return None
        if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            with suppress(OverflowError):  # an integer of hundreds of digits
                if math.isfinite(value):
                    return float(value)
            return self.fail(path, f"must be a finite number, found {_show(value)}")
        if hint is Path and isinstance(value, (str, Path)) and str(value):
            return place_of(value)
        is_bool_for_int = hint is int and isinstance(value, bool)
        if isinstance(hint, type) and isinstance(value, hint) and not is_bool_for_int:
            if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
                return self.fail(path, f"must have at most {LARGEST_BITS} bits, found {_show(value)}")
            return value
        return self.fail(path, f"expected {_describe(hint)}, found {_show(value)}")


# --------------------------------------------------------------------- wording


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _split_key(line: str, path: str, fields: Mapping[str, object]) -> tuple[str, str]:
    """`width: must ...` raised inside a section belongs to the key `section.width`."""
    head, colon, rest = line.partition(": ")
    return (_join(path, head), rest) if colon and head.split(".")[0] in fields else (path, line)


def _nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'steps'?`, or all the names where none is near."""
    return _near(name, known) or f"; known: {', '.join(sorted(known))}"


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _show(value: object) -> str:
    if value is None:
        return "nothing (null)"
    names = {bool: "boolean", int: "integer", float: "number", str: "text"}
    if isinstance(value, Mapping):
        return f"a mapping with {len(value)} keys"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return f"the {names.get(type(value), type(value).__name__)} {value!r:.80}"


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _describe(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(a) for a in args)
    if origin is Literal:
        return ", ".join(str(a) for a in args)
    if origin in (list, tuple):
        return "a list, such as [a, b]"
    if dataclasses.is_dataclass(hint):
        return f"a mapping{_required(hint)}"
    if hint is type(None):
        return "null"
    return SCALARS.get(hint, f"a {getattr(hint, '__name__', hint)}")


def _required(cls: Any) -> str:
    """` with at least layers, heads`: of a section, what it cannot do without."""
    missing = dataclasses.MISSING
    names = [f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing]
    return f" with at least {', '.join(names)}" if names else ""


# ------------------------------------------------------------------------ YAML


_DIGITS = "-+.0123456789"


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `6e-4` as a number, and tells where what looks like a value is none. Empty
    documents before and after the only one are none: many a file ends in `---`."""

    def get_single_node(self) -> yaml.Node | None:
        found: yaml.Node | None = None
        while self.check_node():
            node = self.get_node()
            if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _NULL and not node.value):
                continue
            if found is not None:
                problem = "a second document begins here, where one is expected"
                raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
            found = node
        return found

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag == _INTEGER and (digits := _OCTAL.fullmatch(node.value)):
            problem = f"{node.value!r:.40} has zeros before it, as octal numbers have; write {digits[1]:.40}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except ValueError:  # the date 2026-02-30, an integer of over 4,300 digits, `!!int abc`
            kind = node.tag.rpartition(":")[2]
            problem = f"{node.value!r:.40} cannot be read as {kind}; write it in quotes if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_INTEGER, _TEXT, _NULL = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "str", "null"))
_OCTAL = re.compile(r"[-+]?0[0_]*([1-7][0-7_]*)")
_SIXTIES = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?\Z")
_Loader.yaml_implicit_resolvers = {
    first: [*([(_TEXT, _SIXTIES)] if first in _DIGITS else []), *resolvers]  # the first that fits counts
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list(_DIGITS)
)


def parse_scalar(text: str) -> object:
    """A value as YAML reads it: `12`, `6e-4`, `true`, `null`, `90s`, `[1, 2]`. Raises ConfigError, also where
    it names a key twice."""
    try:
        value, _ = _read(text, f"{text!r:.80}", None)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r:.80} is not a YAML value: {_first_line(error)}") from error
    return value


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The mapping in a YAML file, and for each dotted key its place (`file line 7`).

    Raises ConfigError where the file is missing, unreadable, not YAML, not a mapping, or names a
    key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such configuration file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        value, places = _read(text, str(path), {})
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {_show(value)}")
    return value, places


def _read(text: str, where: str, empty: Any) -> tuple[Any, dict[str, str]]:
    """What a document holds, `empty` where there is none, and the place of each key. Raises YAMLError;
    ConfigError where a key is written twice."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        places: dict[str, str] = {}
        if node is not None:
            _collect_places(node, "", where, places, set())
        return empty if node is None else loader.construct_document(node), places
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply, or within itself by an alias (`*name`)") from None
    finally:
        loader.dispose()


def _collect_places(
    node: yaml.Node, prefix: str, where: str, places: dict[str, str], done: set[yaml.Node]
) -> None:
    """What an alias (`*name`) stands for is looked into once: a few lines of these may hold billions."""
    if node in done:
        return
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _collect_places(item, f"{prefix}[{number}]", where, places, done)
    elif isinstance(node, yaml.MappingNode):
        # Of this mapping alone: another may hold a key that reads the same, `a.b` as the `b` of `a`.
        first: dict[str, str] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            name = _join(prefix, key.value)
            place = f"{where} line {key.start_mark.line + 1}"
            if key.value in first:
                raise ConfigError(f"{place}: {name}: written twice; the first is at {first[key.value]}")
            first[key.value] = place
            places.setdefault(name, place)
            _collect_places(value, name, where, places, done)
    done.add(node)


def _first_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem
