"""YAML as people mean it: how Holdfast reads it, and how it writes it so that all read the same.

YAML's versions differ in what a bare word is. `1e5` is text to PyYAML, and a number to us, to the trainer
and to kubectl; `3:1` is text to us and to kubectl, and 181 to PyYAML, which counts by sixties; `089` and `y`
are text to us, and to kubectl a number and a true. What is written here has quotes around every text that any
of them would take for something else.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_NUMBER = r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)"
_EXPONENT = r"[eE][-+]?\d+"
_ELSEWHERE = rf"{_NUMBER}({_EXPONENT})?|[-+]?0[xXoObB][\da-fA-F_]+|[yYnN]"
_SIXTIES = r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?"
_FLOAT = "tag:yaml.org,2002:float"
_TEXT = "tag:yaml.org,2002:str"
_INTEGER = "tag:yaml.org,2002:int"
_NULL = "tag:yaml.org,2002:null"
_OCTAL = re.compile(r"[-+]?0[0_]*([1-7][0-7_]*)")
_DIGITS = "-+.0123456789"


class Loader(yaml.CSafeLoader):
    """`1e-3` is a number (PyYAML reads a string), a date or a ratio stays text. `0100` is an error: it is 64
    in one of YAML's versions, and 100 in the other. Empty documents before and after the only one are none,
    to kubectl too: many a file ends in `---`."""

    def get_single_node(self) -> yaml.Node | None:
        found: yaml.Node | None = None
        while self.check_node():
            node = self.get_node()
            if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _NULL and not node.value):
                continue
            if found is not None:
                raise yaml.composer.ComposerError(
                    "expected a single document in the stream",
                    found.start_mark,
                    "but found another document",
                    node.start_mark,
                )
            found = node
        return found

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag == _INTEGER and (digits := _OCTAL.fullmatch(node.value)):
            problem = (
                f"{node.value!r:.40} has zeros before it, as octal numbers have; write {digits[1]:.40}, "
                "or put it in quotes if it is text"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except ValueError:  # an integer of over 4,300 digits, `!!int abc`
            kind = node.tag.rpartition(":")[2]
            problem = f"{node.value!r:.40} cannot be read as {kind}; write it in quotes if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


Loader.yaml_implicit_resolvers = {
    first: [
        *([(_TEXT, re.compile(rf"^{_SIXTIES}\Z"))] if first in _DIGITS else []),  # the first that fits counts
        *((tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"),
    ]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(_FLOAT, re.compile(rf"^{_NUMBER}{_EXPONENT}\Z"), list(_DIGITS))


class _Dumper(yaml.CSafeDumper):
    """Quotes a text that resolves to another type: so it is told of the types that others see."""


_Dumper.add_implicit_resolver(_FLOAT, re.compile(rf"^({_ELSEWHERE})\Z"), [*_DIGITS, *"yYnN"])


def dump(value: Any, *, width: int = 80, unicode: bool = True) -> str:
    """One document; keys stay in their order. Without `unicode` it is in ASCII."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=unicode, width=width)
