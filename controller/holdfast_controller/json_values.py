"""What of a document JSON cannot say, or would change.

Jobs are sent and kept as JSON: a key `NO` of YAML, which is the value false, would arrive as "false". Who
wrote it is told so instead, by the command before it sends and by the API for everybody else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from .cluster import Invalid

DEPTH_LIMIT = 100
NODE_LIMIT = 100_000
"""Values in one document, its aliases expanded."""
FAULTS_TOLD = 100
"""Of one document: nobody reads more, and to find the nearest right key for each takes a while."""
INTEGERS = range(-(2**63), 2**63)
"""Kubernetes keeps all others as floats, and Python refuses to write those of thousands of digits."""
SHOWN = 80


def check_json(document: object) -> None:
    """Raises Invalid with a line for each fault, at most `FAULTS_TOLD`."""
    if more_values_than(NODE_LIMIT, document):
        raise Invalid(f"too many values; at most {NODE_LIMIT}: put large tables into files beside the data")
    if faults := list(islice(_faults(document, "", 0), FAULTS_TOLD)):
        raise Invalid(summary(faults, len(faults)), faults)


def summary(faults: list[str], count: int) -> str:
    """`faults` are the first of so many."""
    if count == 1:
        return faults[0]
    least = "at least " if count == FAULTS_TOLD else ""
    return f"{least}{count} faults; the first: {faults[0]}"


def more_values_than(most: int, document: object) -> bool:
    """Whether it holds more of them, mappings and lists counted too; it is looked through no further."""
    count, left = 1, [document]
    while left and count <= most:
        holder: Any = left.pop()
        if isinstance(holder, Mapping | list):
            count += len(holder)
            left += holder.values() if isinstance(holder, Mapping) else holder
    return count > most


def kind_of(value: object) -> str:
    """As people call it who write YAML."""
    names = {dict: "mapping", list: "list", str: "string", bool: "true/false value", type(None): "null"}
    names |= {int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)


def _faults(value: object, path: str, depth: int) -> Iterator[str]:
    if depth > DEPTH_LIMIT:
        yield f"{path[:40]}...: nested deeper than {DEPTH_LIMIT} levels"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if fault := _key_fault(key):
                yield f"{path or 'document'}: the key {_shown(key)} {fault}"
            else:
                yield from _faults(item, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, f"{path}[{index}]", depth + 1)
    elif fault := _scalar_fault(value):
        yield f"{path}: {fault}"


def _key_fault(key: object) -> str | None:
    if not isinstance(key, str):
        return f"is a {kind_of(key)}; write it in quotes"
    return None if _is_text(key) else "holds half a surrogate pair, which is no character"


def _scalar_fault(value: object) -> str | None:
    match value:
        case str():
            whole = _is_text(value)
            return None if whole else f"{_shown(value)} holds half a surrogate pair, which is no character"
        case bool() | None:
            return None
        case int():
            if value in INTEGERS:
                return None
            return f"an integer of {value.bit_length()} bits does not fit into 64; write it in quotes"
        case float():
            if math.isfinite(value):
                return None
            return f"{value} is no JSON number; leave the key out or write it in quotes"
        case _:
            return f"a {kind_of(value)} cannot be kept as JSON; write it in quotes"


def _is_text(value: str) -> bool:
    """JSON's escapes can name half of a surrogate pair; nothing can be encoded that has one."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    text = hex(value) if isinstance(value, int) and value not in INTEGERS else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
