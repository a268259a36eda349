"""JSON Schemas for kubeconform, made from what a running apiserver says of its own kinds: nothing is fetched.

OpenAPI v2 is nearly JSON Schema. What differs: `int-or-string` is told by its format alone, and unknown
fields are not forbidden, which here they are: a misspelt field would be dropped without a word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOCATION = "{{ .Group }}-{{ .ResourceAPIVersion }}-{{ .ResourceKind }}.json"


def write_schemas(openapi: dict[str, Any], directory: Path) -> str:
    """One file a kind, and one with all that they refer to; returns kubeconform's -schema-location."""
    definitions = {name: _strict(body) for name, body in openapi["definitions"].items()}
    (directory / "all.json").write_text(json.dumps({"definitions": definitions}))
    for name, body in openapi["definitions"].items():
        for kind in body.get("x-kubernetes-group-version-kind", ()):
            # kubeconform calls the core group by its version.
            group, version = kind["group"] or kind["version"], kind["version"]
            file = f"{group}-{version}-{kind['kind'].lower()}.json"
            (directory / file).write_text(json.dumps({"$ref": f"all.json#/definitions/{name}"}))
    return f"{directory}/{LOCATION}"


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("format") == "int-or-string" or node.get("x-kubernetes-int-or-string"):
        return {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    made = {
        name: _strict(value)
        for name, value in node.items()
        if name not in ("default", "description", "format") or not isinstance(value, str)
    }
    if (
        isinstance(node.get("properties"), dict)
        and "additionalProperties" not in node
        and not node.get("x-kubernetes-preserve-unknown-fields")
    ):
        made["additionalProperties"] = False
    return made
