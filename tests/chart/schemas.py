"""JSON Schemas for kubeconform, made from what a running apiserver says of its own kinds: nothing is fetched.

OpenAPI v2 is nearly JSON Schema. What differs: `int-or-string` is told by its format alone, and unknown
fields are not forbidden, which here they are: a misspelt field would be dropped without a word.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_TOLD = ("default", "description", "format")
"""Said for people, or in words that JSON Schema does not have (int32, byte)."""
LOCATION = "{{ .Group }}-{{ .ResourceAPIVersion }}-{{ .ResourceKind }}.json"


def write_schemas(openapi: dict[str, Any], directory: Path) -> str:
    """One file a kind, with all that it refers to; returns kubeconform's -schema-location."""
    definitions = {name: _strict(body) for name, body in openapi["definitions"].items()}
    for name, body in openapi["definitions"].items():
        for kind in body.get("x-kubernetes-group-version-kind", ()):
            # kubeconform calls the core group by its version.
            group, version = kind["group"] or kind["version"], kind["version"]
            file = f"{group}-{version}-{kind['kind'].lower()}.json"
            needed = {one: definitions[one] for one in _reached(name, definitions)}
            schema = {"$ref": f"#/definitions/{name}", "definitions": needed}
            (directory / file).write_text(json.dumps(schema))
    return f"{directory}/{LOCATION}"


def _reached(name: str, definitions: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    ahead = [name]
    while ahead:
        one = ahead.pop()
        if one not in found:
            found.add(one)
            ahead += re.findall(r'"#/definitions/([^"]+)"', json.dumps(definitions[one]))
    return found


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("format") == "int-or-string" or node.get("x-kubernetes-int-or-string"):
        return {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    made = {name: _strict(value) for name, value in node.items() if name not in (*_TOLD, "properties")}
    if "properties" in node:
        # Names of fields, of which one may be called as a keyword is.
        made["properties"] = {name: _strict(field) for name, field in node["properties"].items()}
        if "additionalProperties" not in node and not node.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    return made
