"""`holdfast controller`: the controller of a cluster, as its chart runs it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..settings import ClusterSettings

StartOnCluster = Callable[["ClusterSettings"], None]
"""Runs a controller until it is asked to end."""


class EngineName(StrEnum):
    KUBERNETES = "kubernetes"


def controller_command(start: StartOnCluster) -> Callable[..., None]:
    """The command over a composition root."""

    def controller(
        engine: Annotated[EngineName, typer.Option(help="What runs the attempts.")] = EngineName.KUBERNETES,
        kubeconfig: Annotated[
            str | None, typer.Option(help="Of the cluster (KUBECONFIG, else this pod's own account).")
        ] = None,
        host: Annotated[str | None, typer.Option(help="Address to listen on (0.0.0.0).")] = None,
        port: Annotated[
            int | None, typer.Option(help="Port to listen on (8765); 0 takes a free one.")
        ] = None,
        pod_settings: Annotated[
            Path | None, typer.Option(help="YAML file: what the pods of all jobs get.")
        ] = None,
        lease: Annotated[
            str | None, typer.Option(help="Name of the Lease that says which controller acts (holdfast).")
        ] = None,
        namespace: Annotated[str | None, typer.Option(help="Where the Lease lies (this pod's own).")] = None,
        identity: Annotated[str | None, typer.Option(help="Who holds the Lease (this pod's name).")] = None,
        log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (info).")] = None,
        log_format: Annotated[str | None, typer.Option(help="auto, console or json (auto).")] = None,
    ) -> None:
        """Start the controller of a Kubernetes cluster; the chart runs this.

        Several may run: one acts, all answer REST. Jobs run on without any of them.
        """
        from ..settings import load_cluster_settings

        start(
            load_cluster_settings(
                kubeconfig=kubeconfig,
                listen_host=host,
                listen_port=port,
                pod_settings=pod_settings,
                leader_election=lease,
                pod_namespace=namespace,
                pod_name=identity,
                log_level=log_level,
                log_format=log_format,
            )
        )

    return controller
