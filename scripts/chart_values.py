"""The values that the chart takes, typed: `values.schema.json` is made from here.

helm checks every install and upgrade against it, so a misspelt value is an error and not a default.
`jobs` is the controller's own class: what helm accepts, the controller can read.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from holdfast_controller.pod_settings import PodSettings

GPU_PRESENT = "nvidia.com/gpu.present"
GKE_ACCELERATOR = "cloud.google.com/gke-accelerator"
"""By which NVIDIA's GPU feature discovery and GKE mark nodes with GPUs."""

Document = dict[str, Any]
Labels = dict[str, str]
Port = Annotated[int, Field(ge=1, le=65535)]
Slices = Annotated[int, Field(ge=2, le=100)]


class _Values(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", validate_default=True
    )


def _needs(*keys: str) -> ConfigDict:
    """helm takes a null, as of a section with nothing but comments in it, for a key that is not there: not
    even the default. These the chart cannot do without."""
    return ConfigDict(json_schema_extra={"required": list(keys)})


class Image(_Values):
    model_config = _needs("repository")

    repository: str = Field(default="holdfast-controller", min_length=1)
    tag: str = Field(default="", description="By default the chart's appVersion.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: list[str] = Field(default_factory=list)


class NetworkPolicy(_Values):
    model_config = _needs("apiServerPorts")  # a rule without ports would let everything out

    enabled: bool = True
    from_: list[Document] = Field(default_factory=list, alias="from", description="NetworkPolicy peers.")
    api_server_ports: list[Port] = Field(default=[443, 6443, 8443, 16443], min_length=1)


class Credentials(_Values):
    name: str = ""
    key: str = Field(default="token", min_length=1)


class Monitoring(_Values):
    enabled: bool = True
    interval: str = Field(default="15s", pattern=r"^[0-9]+(ms|s|m)$")
    labels: Labels = Field(default_factory=dict)
    credentials: Credentials = Credentials()


class Exporter(_Values):
    model_config = _needs("kubeletDirectory")

    enabled: bool = False
    affinity: Document = Field(
        default={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": GPU_PRESENT, "operator": "In", "values": ["true"]}]},
                        {"matchExpressions": [{"key": GKE_ACCELERATOR, "operator": "Exists"}]},
                    ]
                }
            }
        },
        description="To nodes with GPUs.",
    )
    node_selector: Labels = Field(default_factory=dict)
    tolerations: list[Document] = Field(default=[{"operator": "Exists"}])
    runtime_class_name: str = Field(
        default="", description="Of NVIDIA's runtime, where it is not the default."
    )
    driver_directory: str = Field(
        default="", pattern=r"^(/.*)?$", description="Of libnvidia-ml.so.1 on the node."
    )
    privileged: bool = False
    ranks: bool = Field(
        default=False, description="Tell the ranks of one container apart; takes two capabilities."
    )
    kubelet_directory: str = Field(default="/var/lib/kubelet", pattern=r"^/.*[^/]$")
    resources: Document = Field(
        default={"requests": {"cpu": "20m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}}
    )


class GpuSharing(_Values):
    namespace: str = Field(default="", description="Where the device plugin runs; by default the release's.")
    slices: dict[Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")], Slices] = Field(
        default_factory=dict,
        description="Slices of each GPU, by the name of the node pool's configuration.",
        json_schema_extra={"additionalProperties": False},
    )


class Dashboards(_Values):
    model_config = _needs("labels")  # without one nobody finds a dashboard

    enabled: bool = True
    labels: Labels = Field(default={"grafana_dashboard": "1"}, min_length=1)
    annotations: Labels = Field(default_factory=dict)


class Alerts(_Values):
    enabled: bool = True
    labels: Labels = Field(default_factory=dict)
    disabled: list[str] = Field(default_factory=list, description="Names of alerts to leave out.")
    runbooks: str = Field(default="", description="Address at which docs/runbooks.md is served.")


class Ingress(_Values):
    enabled: bool = False
    class_name: str = ""
    host: str = ""
    tls_secret: str = Field(default="", description="Secret with the certificate of `host`.")
    annotations: Labels = Field(default_factory=dict)


class HttpRoute(_Values):
    enabled: bool = False
    parent_refs: list[Document] = Field(default_factory=list)
    hostnames: list[str] = Field(default_factory=list)


class Values(_Values):
    """As values.yaml has them."""

    model_config = _needs(
        *("image", "jobs", "networkPolicy", "monitoring", "dashboards", "alerts", "exporter", "gpuSharing"),
        *("ingress", "httpRoute", "logLevel"),
    )

    replicas: int = Field(default=2, ge=1, le=10)
    image: Image = Field(default_factory=Image)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    resources: Document = Field(
        default={"requests": {"cpu": "100m", "memory": "192Mi"}, "limits": {"memory": "512Mi"}}
    )
    node_selector: Labels = Field(default_factory=dict)
    tolerations: list[Document] = Field(default_factory=list)
    jobs: PodSettings = Field(default_factory=PodSettings)
    network_policy: NetworkPolicy = Field(default_factory=NetworkPolicy)
    monitoring: Monitoring = Field(default_factory=Monitoring)
    dashboards: Dashboards = Field(default_factory=Dashboards)
    alerts: Alerts = Field(default_factory=Alerts)
    exporter: Exporter = Field(default_factory=Exporter)
    gpu_sharing: GpuSharing = Field(default_factory=GpuSharing)
    ingress: Ingress = Field(default_factory=Ingress)
    http_route: HttpRoute = Field(default_factory=HttpRoute)


def values_schema() -> str:
    """The text of values.schema.json. `global` is what helm itself adds where the chart is a part of one."""
    schema = Values.model_json_schema(by_alias=True)
    schema["properties"]["global"] = {"type": "object"}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
