"""Files that are made from code, and the proof that they are fresh.

Each generator is a function that returns the file's whole text; nothing else may decide its contents, but for
README.md, of which a table is generated.

    generate.py            write them all
    generate.py --check    write nothing; show what differs, exit 1 where something does
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def job_schema() -> str:
    """JSON Schema of a TrainingJob, as users write it; editors complete and check job files by it."""
    from holdfast_controller.jobs import TrainingJob

    return json.dumps(TrainingJob.model_json_schema(by_alias=True), indent=2, ensure_ascii=False) + "\n"


def openapi() -> str:
    """The REST interface. Describing it touches neither store nor engine, so none is given."""
    from holdfast_controller.api.app import create_app

    nothing: Any = None
    app = create_app(nothing, nothing, token=None)
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False) + "\n"


def crd() -> str:
    """TrainingJobs as Kubernetes knows them."""
    from scripts.crd import crd

    return crd()


def chart_values() -> str:
    """What `helm install` may be given."""
    from scripts.chart_values import values_schema

    return values_schema()


def settings() -> str:
    """What `python -m holdfast_trainer explain` shows, as a page."""
    from holdfast_trainer.reference import sections

    page = [
        "# The settings of a training",
        "What stands in the file that `python -m holdfast_trainer train` is given, and under `spec.config` "
        "in a job. `key=value` behind the file wins over it. `python -m holdfast_trainer explain` shows the "
        "same, `explain train.precision` one of them. This page is made from the source.",
    ]
    for section in sections():
        rows = [
            (setting.key, setting.takes, setting.default, setting.meaning) for setting in section.settings
        ]
        page += [f"## `{section.key}`", section.meaning, _settings("setting", rows)]
    return "\n\n".join(page) + "\n"


def job() -> str:
    """What `holdfast explain spec` shows, as a page."""
    from holdfast_controller.cli.explaining import keys

    page = (
        "# What a job can say",
        "A TrainingJob is submitted by `holdfast submit`, REST or `kubectl apply`; "
        "[examples](../k8s/examples). `holdfast explain` shows the same, `holdfast explain spec.retries` a "
        "part of it and `holdfast explain status` what its status says. What stands under `spec.config` is "
        "the program's own: for the trainer that comes with Holdfast it is in [settings.md](settings.md). "
        "This page is made from the source.",
        _settings(
            "key",
            [
                (one.key, one.takes, None if one.required else one.default or "", one.meaning)
                for one in keys()
                if one.key.startswith("spec.")
            ],
        ),
    )
    return "\n\n".join(page) + "\n"


def _settings(of: str, rows: Sequence[tuple[str, str, str | None, str]]) -> str:
    """Key, what it takes, default (None: it is required, empty: there is none), meaning."""
    lines = [f"| {of} | takes | default | |", "| --- | --- | --- | --- |"]
    for key, takes, default, meaning in rows:
        told = "required" if default is None else default and f"`{default}`"
        lines.append(f"| `{key}` | {takes} | {told} | {meaning} |")
    return "\n".join(lines)


def faults() -> str:
    """What the fault suite has seen."""
    from scripts.faults import kept, page

    return page(kept())


def readme() -> str:
    """The same, in brief; the rest of the page is as it is."""
    from scripts.faults import in_readme, kept

    return in_readme((ROOT / "README.md").read_text(encoding="utf-8"), kept())


POD_RESOURCES = "controller/holdfast_controller/exporter/pod_resources"


def messages(suffix: str) -> str:
    """The kubelet's pod-resources messages in Python (`.py`), and their types (`.pyi`)."""
    import grpc_tools
    from grpc_tools import protoc

    source = ROOT / f"{POD_RESOURCES}.proto"
    option = {".py": "--python_out", ".pyi": "--pyi_out"}[suffix]
    with tempfile.TemporaryDirectory(prefix="holdfast-messages-") as out:
        words = ["protoc", f"-I{source.parent}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
        if code := protoc.main([*words, f"{option}={out}", source.name]):
            raise SystemExit(f"protoc ended with {code} on {source}; it says above what is wrong")
        return (Path(out) / f"pod_resources_pb2{suffix}").read_text(encoding="utf-8")


def monitoring(name: str) -> str:
    """A dashboard or the alerts."""
    from scripts.monitoring import FILES

    return FILES[name]()


MONITORING = (
    "helm/holdfast/alerts/holdfast.yaml",
    "helm/holdfast/dashboards/controller.json",
    "helm/holdfast/dashboards/gpus.json",
    "helm/holdfast/dashboards/job.json",
)

GENERATORS: Mapping[str, Callable[[], str]] = {
    "docs/trainingjob.schema.json": job_schema,
    "docs/openapi.json": openapi,
    "docs/faults.md": faults,
    "docs/job.md": job,
    "docs/settings.md": settings,
    "README.md": readme,
    "helm/holdfast/templates/crd.yaml": crd,
    "helm/holdfast/values.schema.json": chart_values,
    **{name: partial(monitoring, name) for name in MONITORING},
    f"{POD_RESOURCES}_pb2.py": lambda: messages(".py"),
    f"{POD_RESOURCES}_pb2.pyi": lambda: messages(".pyi"),
}


def stale(root: Path, generators: Mapping[str, Callable[[], str]]) -> list[str]:
    """A diff (at most 40 lines) for each file that is not what its generator makes."""
    diffs = []
    for name, generate in generators.items():
        path = root / name
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        new = generate()
        if old != new:
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), f"{name} (here)", f"{name} (fresh)", lineterm=""
            )
            diffs.append("\n".join([f"{name} is stale: run `make generate`", *list(lines)[:40]]))
    return diffs


def write(root: Path, generators: Mapping[str, Callable[[], str]]) -> None:
    for name, generate in generators.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(generate(), encoding="utf-8")
        print(f"wrote {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated files, or check that they are fresh.")
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write(ROOT, GENERATORS)
        return 0
    diffs = stale(ROOT, GENERATORS)
    print("\n\n".join(diffs) or f"{len(GENERATORS)} generated files are fresh")
    return 1 if diffs else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a file, it finds its neighbours by scripts.*
    sys.exit(main())
