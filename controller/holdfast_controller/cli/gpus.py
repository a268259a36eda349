"""`holdfast gpus` and `holdfast exporter`: the GPUs of this machine, once and for a Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .documents import camel, print_document
from .showing import TableOutput

if TYPE_CHECKING:
    from ..exporter.attribution import Use
    from ..exporter.collector import Snapshot
    from ..exporter.readings import DeviceReading


PATIENT_SECONDS = 30.0
"""A person would rather wait than be told of a hang that is none."""


def add_to(cli: typer.Typer) -> None:
    cli.command("gpus")(gpus)
    cli.command("exporter")(exporter)


def gpus(output: Annotated[TableOutput, typer.Option("-o", "--output")] = TableOutput.TABLE) -> None:
    """Show the GPUs of this machine: how busy they are, and with what.

    No controller is asked: it is NVIDIA's driver that answers.
    """
    from ..cluster import Unavailable
    from ..exporter.collector import NVML
    from ..exporter.running import Options, collecting

    with collecting(Options(deadline=PATIENT_SECONDS)) as collector:
        snapshot = collector.look()
    if fault := snapshot.sources[NVML]:
        raise Unavailable(f"no GPU can be read: {fault.message}")
    if output != TableOutput.TABLE:
        print_document(document(snapshot), output.value)
        return
    if not snapshot.devices:
        typer.echo(f"the driver ({snapshot.driver}) knows no GPU", err=True)
        return
    from .gpu_table import gpu_columns
    from .tables import console, table

    screen = console()
    screen.print(table(gpu_columns(snapshot), screen.width))


def exporter(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 9401,
    deadline: Annotated[
        float, typer.Option(min=0.1, max=60, help="Seconds that NVML has for an answer.")
    ] = 2.0,
    pod_resources: Annotated[
        Path | None, typer.Option(help="The kubelet's socket, on a node of a cluster.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(envvar="NODE_NAME", help="The node whose pods are looked up.")
    ] = None,
    apiserver: Annotated[str | None, typer.Option(help="Its address (this pod's own).")] = None,
    account: Annotated[
        Path | None, typer.Option(help="Directory with token and ca.crt (this pod's own).")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="auto, console or json.")] = "auto",
) -> None:
    """Serve what every GPU of this machine does, for Prometheus, until it is asked to end.

    Processes are told apart by job where they are of the local engine, by pod on a node of a cluster.
    """
    from ..exporter.pods import ACCOUNT
    from ..exporter.running import ExporterError, Options, run
    from ..logs import configure_logging

    log_level = log_level.lower()
    for name, value, known in (
        ("--log-level", log_level, ("debug", "info", "warning", "error")),
        ("--log-format", log_format, ("auto", "console", "json")),
    ):
        if value not in known:
            raise ExporterError(f"{name} {value!r}: it is one of {', '.join(known)}")
    configure_logging(log_level, log_format)  # type: ignore[arg-type]
    options = Options(
        host=host,
        port=port,
        deadline=deadline,
        pod_resources=pod_resources,
        node=node,
        apiserver=apiserver,
        account=account or ACCOUNT,
    )
    shown = f"[{host}]" if ":" in host else host
    run(options, lambda bound: typer.echo(f"metrics at http://{shown}:{bound}/metrics"))


def document(snapshot: Snapshot) -> dict[str, Any]:
    """What `-o json` prints: figures by the series' names, in their units; what is not known is left out."""
    return {
        "driver": snapshot.driver,
        "cuda": snapshot.cuda,
        "gpus": [_gpu(device, snapshot) for device in snapshot.devices],
    }


def _gpu(device: DeviceReading, snapshot: Snapshot) -> dict[str, Any]:
    from ..exporter.figures import BY_NAME

    return {
        "index": device.index,
        "uuid": device.uuid,
        "name": device.name,
        "bus": device.bus,
        "fault": device.fault and device.fault.value,
        "figures": {
            camel(BY_NAME[name].series.removeprefix("holdfast_gpu_")): value
            for name, value in device.figures.items()
        },
        "slowed": list(device.slowed or ()),
        "missing": {camel(name): reason.value for name, reason in device.missing.items()},
        "mig": [
            {"uuid": each.uuid, "slices": each.slices, "memoryUsedBytes": each.memory_used}
            for each in device.mig
        ],
        "holders": [_holder(use) for use in snapshot.uses if use.uuid == device.uuid],
    }


def _holder(use: Use) -> dict[str, Any]:
    """Of processes that belong to no job: without the names of one; `mig` where on a part of a GPU."""
    return {
        **({name: value for name, value in vars(use.holder).items() if value} if use.holder else {}),
        **({"mig": use.mig} if use.mig else {}),
        "processes": use.processes,
        "memoryBytes": use.memory_bytes,
        "smRatio": use.sm_ratio,
    }
