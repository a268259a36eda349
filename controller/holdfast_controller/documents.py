"""A submitted document: from bytes to a TrainingJob, or to a list of what is wrong with it.

Text becomes a plain mapping (`parse`), the mapping a validated job (`to_job`). Everything that YAML or
JSON would change silently is an error instead: a key given twice, a number that is not finite, a key
that is not a string. Aliases are counted before they are expanded, so a few hundred bytes cannot stand
for gigabytes.
"""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from .cluster import Invalid
from .jobs import API_VERSION, KIND, TrainingJob
from .json_values import DEPTH_LIMIT, FAULTS_TOLD, NODE_LIMIT, check_json, kind_of, summary
from .spec import JOB_NAME_RULE, NAMESPACE_RULE, RULES
from .yaml_text import Loader

M = TypeVar("M", bound=BaseModel)

CHARACTER_LIMIT = 1024 * 1024
"""Characters of all its keys and values, counted so too; the API reads no longer document anyway."""
SERVER_OWNED = ("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
"""Metadata that `holdfast get -o yaml` shows and no user sets; left out on submit, as Kubernetes does."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LABEL_WORD = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_DOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_RULE = "letters, digits, '-', '_' and '.', first and last a letter or digit, at most 63"


def parse(
    data: bytes, source: str, syntax: Literal["json", "yaml"] = "yaml", *, holds: str = KIND
) -> dict[str, Any]:
    """The mapping that a document holds. Raises Invalid; `source` names it in messages, `holds` what it
    should have."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Invalid(f"{source}: byte {error.start} is not UTF-8") from None
    if not text.strip():
        raise Invalid(f"{source} is empty: it should hold one {holds}")
    try:
        body = _parse_json(text, source) if syntax == "json" else _parse_yaml(text, source)
    except RecursionError:
        raise Invalid(f"{source} is nested too deeply") from None
    if not isinstance(body, dict):
        raise Invalid(f"{source} holds a {kind_of(body)}, not the mapping of a {holds}")
    return body


def parse_value(text: str, source: str) -> Any:
    """One YAML value, as it would stand in a document. Raises Invalid."""
    return _parse_yaml(text, source)


def _parse_json(text: str, source: str) -> object:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise Invalid(f"{source}: the key {key!r} is given twice in one object")
            seen[key] = value
        return seen

    def integer(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # Python reads at most 4,300 digits
            raise Invalid(
                f"{source}: the integer {digits[:20]}... of {len(digits)} digits does not fit into 64 bits; "
                "write it in quotes"
            ) from None

    try:
        return json.loads(text, object_pairs_hook=unique, parse_int=integer)
    except json.JSONDecodeError as error:
        raise Invalid(f"{source}: line {error.lineno}, column {error.colno}: {error.msg}") from None


def _parse_yaml(text: str, source: str) -> object:
    loader = Loader(text)
    try:
        _check_depth(text, source)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, source)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        if _SURROGATE.search(text):  # half a pair: JSON alone spells a character by two
            with suppress(Invalid):
                return _parse_json(text, source)
        mark, problem = error.problem_mark or error.context_mark, error.problem or str(error)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        if problem.startswith("but "):  # the second half of a sentence, as of two documents in one file
            problem = f"{error.context}, {problem}"
        if mark and text[mark.index : mark.index + 1] == "\t":
            problem = "a tab stands where YAML takes spaces alone"
        raise Invalid(f"{source}: {where}{problem}") from None
    except yaml.YAMLError as error:
        raise Invalid(f"{source}: {error}") from None
    finally:
        loader.dispose()


def _check_depth(text: str, source: str) -> None:
    """Bounded nesting, seen in the events: the composer of libyaml's binding overflows the C stack."""
    depth = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEPTH_LIMIT:
            line = f"line {event.start_mark.line + 1}: " if event.start_mark else ""
            raise Invalid(f"{source}: {line}nested deeper than {DEPTH_LIMIT} levels")


class _Extent(NamedTuple):
    """Of a node, its aliases expanded."""

    values: int
    characters: int

    def and_of(self, other: _Extent) -> _Extent:
        return _Extent(self.values + other.values, self.characters + other.characters)


def _check_nodes(root: yaml.Node, source: str) -> None:
    """No key twice in one mapping, no alias that contains itself, not too much in all.

    An alias stands for all that its anchor names: parsed it costs nothing, and written as JSON it is there
    as often as it was named, each value and each character of it.
    """
    known: dict[int, _Extent] = {}
    open_nodes: set[int] = set()

    def at(node: yaml.Node) -> str:
        return f"{source}: line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"

    def extent(node: yaml.Node) -> _Extent:
        if isinstance(node, yaml.ScalarNode):
            return _Extent(1, len(node.value))
        if id(node) in known:
            return known[id(node)]
        if id(node) in open_nodes:
            raise Invalid(f"{at(node)}: an alias stands inside what it names")
        open_nodes.add(id(node))
        total = _Extent(1, 0)
        if isinstance(node, yaml.MappingNode):
            keys: set[tuple[str, str]] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in keys:
                        raise Invalid(f"{at(key)}: the key {key.value!r} is given twice in one mapping")
                    keys.add((key.tag, key.value))
                total = total.and_of(extent(key)).and_of(extent(value))
        else:
            for item in node.value:
                total = total.and_of(extent(item))
        open_nodes.discard(id(node))
        if total.values > NODE_LIMIT:
            raise Invalid(f"{at(node)}: too many values, its aliases expanded; at most {NODE_LIMIT}")
        if total.characters > CHARACTER_LIMIT:
            raise Invalid(
                f"{at(node)}: too much text, its aliases expanded; at most {CHARACTER_LIMIT} characters"
            )
        known[id(node)] = total
        return total

    extent(root)


def to_job(document: Mapping[str, Any], namespace: str | None = None) -> TrainingJob:
    """A new job from a document; `namespace` is where it was sent to.

    Status and server-owned metadata are left out. Raises Invalid with one line per fault: the key's
    path, the value, and for an unknown key the nearest right one.
    """
    check_json(document)
    if faults := _wrong_kind(document):
        raise Invalid(f"this is no {KIND} of {API_VERSION}: {faults[0]}", faults)
    body = {key: value for key, value in document.items() if key != "status"}
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping):
        metadata = {key: value for key, value in metadata.items() if key not in SERVER_OWNED}
        if namespace is not None and metadata.setdefault("namespace", namespace) != namespace:
            raise Invalid(
                f"metadata.namespace is {metadata['namespace']!r}, but the job was sent to namespace "
                f"{namespace!r}: leave it out of the document or send it there"
            )
        body["metadata"] = metadata
    job = _valid(TrainingJob, body)
    if faults := _label_faults(job.metadata.labels):
        raise Invalid(summary(faults, len(faults)), faults[:FAULTS_TOLD])
    return job


def _label_faults(labels: Mapping[str, str]) -> list[str]:
    """A line for each label that no selector can name, and that a cluster would not take."""
    faults = []
    for name, value in labels.items():
        domain, slash, word = name.rpartition("/")
        if not _LABEL_WORD.fullmatch(word) or (slash and not _LABEL_DOMAIN.fullmatch(domain)):
            faults.append(
                f"metadata.labels: {_short(name)} is no label's name: {_LABEL_RULE}, behind a domain and '/' "
                "if you like"
            )
        elif value and not _LABEL_WORD.fullmatch(value):
            faults.append(f"metadata.labels.{name}: {_short(value)} is no label's value: {_LABEL_RULE}")
    return faults


def validate(model: type[M], body: object) -> M:
    """A value of `model`. Raises Invalid with one line per fault."""
    check_json(body)
    return _valid(model, body)


def _valid(model: type[M], body: object) -> M:
    try:
        # Keys are as the published schemas have them: those that our own code uses are no others beside.
        return model.model_validate(body, by_alias=True, by_name=False)
    except ValidationError as error:
        faults = describe_faults(error, model)
        raise Invalid(summary(faults, error.error_count()), faults) from None


def _wrong_kind(document: Mapping[str, Any]) -> list[str]:
    faults = []
    for key, right in (("apiVersion", API_VERSION), ("kind", KIND)):
        if document.get(key, right) != right:
            faults.append(f"{key}: {document[key]!r} should be {right!r}")
    return faults


def describe_faults(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """A line for each of the first faults of a validation: path, what is wrong, the value, the nearest right
    key."""
    lines = []
    for fault in error.errors(include_url=False)[:FAULTS_TOLD]:
        location = tuple(part for part in fault["loc"] if part != "[key]")
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
        lines.append(f"{path or 'document'}: {_describe(fault, location, path, model)}")
    return lines


def _describe(fault: Any, location: tuple[int | str, ...], path: str, model: type[BaseModel]) -> str:
    if fault["type"] == "extra_forbidden":
        known = _keys_at(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        return "unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
    if fault["type"] == "missing":
        return "this key is needed and missing"
    if fault["type"] in ("model_type", "dict_type"):
        return f"a {kind_of(fault['input'])} stands where a mapping is needed"
    if fault["type"] == "value_error":
        return str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "string_type" and isinstance(fault["input"], int | float):
        return (
            f"{fault['input']!r}: a {kind_of(fault['input'])} stands where text is needed; write it in quotes"
        )
    value = _short(fault["input"])
    if path in ("metadata.name", "metadata.namespace") and fault["type"].startswith("string_"):
        return f"{value} {JOB_NAME_RULE if path == 'metadata.name' else NAMESPACE_RULE}"
    if fault["type"] == "string_pattern_mismatch" and (rule := RULES.get(fault["ctx"]["pattern"])):
        return f"{value} {rule}"
    if path == "spec.command" and isinstance(fault["input"], str):
        return f"{value}: text stands where a list is needed, such as [python, train.py]"
    return f"{value}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys that the model knows at a place in the document, as users write them."""
    current: type[BaseModel] | None = model
    for part in location:
        if current is None:
            return []
        field = next((f for f in current.model_fields.values() if f.alias == part), None)
        current = _model_in(field.annotation) if field is not None else None
    return [f.alias or name for name, f in current.model_fields.items()] if current else []


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in typing.get_args(annotation) if (found := _model_in(arg))), None)
