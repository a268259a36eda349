"""The CustomResourceDefinition of TrainingJobs, made from the classes of jobs.py.

JSON Schema as pydantic writes it is not what Kubernetes takes. Its structural schemas have no `$ref`, no
`anyOf` with null, no `additionalProperties: false` (unknown fields are pruned, and kubectl warns of them).
So: references are written out, and a field that may be null is one that may be left out, for the
apiserver drops a null where the schema does not allow one. What the model checks in code is said again
in CEL, so that `kubectl apply` is told at once; the tests hold both to the same cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from holdfast_controller.columns import DESCRIPTIONS, KEY
from holdfast_controller.jobs import KIND, RESERVED_ENV, RESERVED_ENV_PREFIXES, Spec, Status
from holdfast_trainer.contract import CHECKPOINT_EVERY

Schema = dict[str, Any]

GROUP, VERSION, PLURAL = "holdfast.dev", "v1alpha1", "trainingjobs"

_DROPPED = ("title", "additionalProperties", "$defs", "patternProperties", "propertyNames", "const")

# People write 4 as often as "4"; both are kept as they are written.
INT_OR_STRING = ("spec.gpus", "spec.checkpoint.every", "spec.resources.cpu")

_NAMES = ", ".join(f"'{name}'" for name in RESERVED_ENV)
_PREFIXES = " || ".join(f"k.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES)

RULES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "": (
        (
            "self.metadata.name.size() <= 50 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name has at most 50 lower-case letters, digits and dashes, and starts with a letter",
        ),
    ),
    "spec": (
        (
            "!has(self.processes) || !string(self.gpus).matches('^[0-9]+([.][0-9]+)?$') || "
            "double(string(self.gpus)) == 0.0 || self.processes <= 1 || "
            "double(self.processes) <= double(string(self.gpus))",
            "processes: NCCL cannot run two ranks on one device; give at most one a GPU",
        ),
        (
            "!has(self.minReplicas) || self.minReplicas <= self.replicas",
            "minReplicas: not more than replicas",
        ),
        (
            "!has(self.mig) || !string(self.gpus).matches('^[0-9]+([.][0-9]+)?$') || "
            "double(string(self.gpus)) == 1.0",
            "mig: a replica uses one MIG device; set gpus to 1",
        ),
    ),
    "spec.gpus": (
        (
            "string(self).matches('^[0-9]+([.][0-9]+)?$')",
            'gpus is a number such as 0, 1, 4 or "0.25"',
        ),
        (
            "!string(self).matches('^[0-9]+([.][0-9]+)?$') || double(string(self)) < 1.0 || "
            "double(string(self)) == double(int(double(string(self))))",
            "gpus: only whole numbers above 1; a fraction is a share of one GPU",
        ),
        (
            "!string(self).matches('^[0-9]+([.][0-9]+)?$') || double(string(self)) == 0.0 || "
            "double(string(self)) >= 1.0 || "
            "1.0 / double(string(self)) == double(int(1.0 / double(string(self))))",
            "gpus: a share is 1/N of a GPU, such as 0.5, 0.25 or 0.125",
        ),
    ),
    "spec.checkpoint.every": (
        (
            f"string(self).matches('^({CHECKPOINT_EVERY})$')",
            "checkpoint.every is one of: auto, a number of steps (500), seconds (90s)",
        ),
    ),
    "spec.resources.cpu": (
        (
            "string(self).matches('^([0-9]+([.][0-9]+)?|[0-9]+m)$') && string(self).matches('[1-9]')",
            "resources.cpu is a CPU quantity such as 8, 0.5 or 500m",
        ),
    ),
    "spec.resources.memory": (
        (
            "self.matches('^[1-9][0-9]*([.][0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$')",
            "resources.memory is a quantity such as 64Gi or 512Mi",
        ),
    ),
    "spec.env": (
        (
            "self.all(k, k.size() <= 128 && k.matches('^[A-Za-z_][A-Za-z0-9_]*$'))",
            "env: a name has letters, digits and underscores, at most 128",
        ),
        (
            f"self.all(k, !({_PREFIXES} || k in [{_NAMES}]))",
            "env: names of HOLDFAST_*, PET_*, TORCHELASTIC_*, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT are set by the platform",
        ),
    ),
}

# CEL is priced before it runs, by the longest text that may come.
LENGTHS = dict.fromkeys((*INT_OR_STRING, "spec.resources.memory"), 32)

LIST_KEYS = {"status.conditions": ["type"], "status.attempts": ["number"]}

COLUMNS = (
    # name, type, path, priority
    ("Phase", "string", ".status.phase", 0),
    ("Step", "integer", ".status.progress.step", 0),
    ("Attempt", "integer", ".status.attempt", 0),
    ("Disruptions", "integer", ".status.disruptions", 0),
    ("Failures", "integer", ".status.failures", 0),
    ("Goodput", "string", f".status.{KEY}.goodput", 0),
    ("ETA", "string", f".status.{KEY}.eta", 0),
    ("Engine", "string", f".status.{KEY}.engine", 1),
    ("Capacity", "string", ".spec.capacity", 1),
    ("Queue", "string", ".spec.queue", 1),
    ("LastCheckpoint", "integer", ".status.progress.durableStep", 1),
    ("Updated", "date", ".status.progress.updatedAt", 1),  # an age: figures that nobody can renew show theirs
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


def structural(schema: Schema, path: str, definitions: Mapping[str, Schema]) -> Schema:
    """One node of pydantic's JSON Schema in Kubernetes' words, with all that is below it.

    Raises ValueError for what has no such words, so that a change of the model cannot pass unseen.
    """
    node = _written_out(schema, definitions)
    result: Schema = {name: value for name, value in node.items() if name not in _DROPPED}
    if result.get("default", ...) is None:
        del result["default"]
    if unknown := {"anyOf", "oneOf", "allOf", "$ref"} & set(result):
        raise ValueError(f"{path or 'the job'}: {', '.join(sorted(unknown))} has no structural form")
    if "properties" in node:
        result["properties"] = {
            name: structural(child, f"{path}.{name}".lstrip("."), definitions)
            for name, child in node["properties"].items()
        }
    elif node.get("type") == "object":
        result |= _mapping(node, path, definitions)
    if "items" in node:
        result["items"] = structural(node["items"], f"{path}[]", definitions)
    if path in INT_OR_STRING:
        del result["type"]
        result["x-kubernetes-int-or-string"] = True
    if path in LENGTHS:
        result["maxLength"] = LENGTHS[path]
    if path in LIST_KEYS:
        result |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": LIST_KEYS[path]}
    if path in RULES:
        result["x-kubernetes-validations"] = [
            {"rule": rule, "message": message} for rule, message in RULES[path]
        ]
    return result


def _written_out(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Without `$ref` and without null; what stands beside a reference wins over what it names."""
    node = dict(schema)
    if "$ref" in node:
        named = definitions[node.pop("$ref").rsplit("/", 1)[-1]]
        return _written_out({**named, **node}, definitions)
    if "anyOf" in node:
        options = [option for option in node["anyOf"] if option.get("type") != "null"]
        if len(options) == 1:
            del node["anyOf"]
            return _written_out({**_written_out(options[0], definitions), **node}, definitions)
    return node


def _mapping(node: Schema, path: str, definitions: Mapping[str, Schema]) -> Schema:
    """An object whose keys are the user's."""
    patterned = list(node.get("patternProperties", {}).values())
    values = patterned[0] if patterned else node.get("additionalProperties", True)
    if isinstance(values, dict):
        return {"additionalProperties": structural(values, f"{path}.*", definitions)}
    return {"x-kubernetes-preserve-unknown-fields": True}


def _without(schema: Schema, names: tuple[str, ...]) -> Schema:
    """A copy that has none of these keywords, at any depth of properties and items."""
    result = {name: value for name, value in schema.items() if name not in names}
    if "properties" in result:
        result["properties"] = {name: _without(child, names) for name, child in result["properties"].items()}
    if "items" in result:
        result["items"] = _without(result["items"], names)
    return result


def spec_schema() -> Schema:
    schema = Spec.model_json_schema(by_alias=True)
    return _with_defaults(structural(schema, "spec", schema.get("$defs", {})))


def _with_defaults(schema: Schema) -> Schema:
    """An object whose every field may be left out may be left out itself: its fields' defaults then hold."""
    for child in schema.get("properties", {}).values():
        if "properties" in child and any("default" in one for one in child["properties"].values()):
            child.setdefault("default", {})
            _with_defaults(child)
    return schema


def status_schema() -> Schema:
    """Nothing in it is defaulted (what is not there is not known) and only list keys are required."""
    schema = Status.model_json_schema(by_alias=True)
    made = _without(structural(schema, "status", schema.get("$defs", {})), ("default", "required"))
    for path, keys in LIST_KEYS.items():
        made["properties"][path.removeprefix("status.")]["items"]["required"] = keys
    made["properties"][KEY] = {
        "type": "object",
        "description": "Figures as `kubectl get` prints them.",
        "properties": {name: {"type": "string", "description": text} for name, text in DESCRIPTIONS.items()},
    }
    return made


def definition() -> Schema:
    """The CustomResourceDefinition as a plain dict."""
    job = {
        "type": "object",
        "description": "A training job: what a user submits; it lives until it is deleted or its TTL ends.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec_schema(),
            "status": status_schema(),
        },
        "x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in RULES[""]],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            # Uninstalling the chart must not delete every job of the cluster.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["tj"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "priority": priority}
                        for name, kind, path, priority in COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": job},
                }
            ],
        },
    }


def crd() -> str:
    """The file of the chart: YAML without anything for helm to fill in."""
    head = "# Made by `make generate` from controller/holdfast_controller/jobs.py: change that.\n"
    return head + yaml.safe_dump(definition(), sort_keys=False, width=110, allow_unicode=True)
