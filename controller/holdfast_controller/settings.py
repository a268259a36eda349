"""The controller's settings: read once from flags and `HOLDFAST_*`, checked, then passed down.

A flag wins over the environment, the environment over the default; a variable that is set to nothing is not
given. Nothing else in the controller reads the environment, and nothing reads it at import.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from holdfast_trainer import contract

from .cluster import HoldfastError
from .data_directory import DataDirectory, default_data_directory, whole_path
from .listeners import is_loopback
from .prices import NodePrice, Prices
from .spec import LOG_LIMIT, LOG_LIMIT_SAYS, Size
from .visible_gpus import VARIABLE, gpus_present, gpus_shown

PREFIX = "HOLDFAST_"
DEFAULT_PORT = 8765
CLIENT_NAMES = ("HOLDFAST_SERVER", "HOLDFAST_TOKEN", "HOLDFAST_TOKEN_FILE", "HOLDFAST_NAMESPACE")


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]


class SettingsError(HoldfastError):
    """A setting cannot be used; the message names it, its value and the remedy."""


class Settings(BaseSettings):
    """Each field can be given as HOLDFAST_<NAME>."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    data_dir: Path = Field(
        default_factory=default_data_directory, description="Jobs, run directories and token."
    )
    listen_host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    listen_port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="0 takes any free port.")
    no_token: bool = Field(default=False, description="Ask nobody for a token; on loopback only.")
    cpu_slots: int = Field(
        default_factory=lambda: len(os.sched_getaffinity(0)),
        ge=1,
        description="Ranks without a GPU that may run at once; by default the cores of this machine.",
    )
    gpus: int | None = Field(
        default=None,
        ge=0,
        description="How many GPUs to use, the first of those that CUDA_VISIBLE_DEVICES does not hide; by "
        "default all of them.",
    )
    price_per_hour: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="What this machine costs; without it no cost is shown.",
    )
    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$", description="Of the price, ISO 4217.")
    log_limit: Size = Field(default=LOG_LIMIT, description=LOG_LIMIT_SAYS)
    gpu_look_seconds: float = Field(
        default=10.0, gt=0, description="Between two looks at whether jobs use their GPUs."
    )
    log_level: LogLevel = "info"
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: for people on a terminal, JSON elsewhere."
    )

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return whole_path(value)

    @model_validator(mode="after")
    def _wide_needs_a_token(self) -> Settings:
        if self.no_token and not is_loopback(self.listen_host):
            raise ValueError(
                f"refusing to listen on {self.listen_host} without a token: whoever reaches it could run "
                "commands on this machine; drop --no-token (HOLDFAST_NO_TOKEN) or listen on 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _gpus_are_there(self) -> Settings:
        _ = self.devices
        return self

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The numbers of the GPUs to use, as `nvidia-smi` has them. Raises ValueError."""
        present, visible = gpus_present(), os.environ.get(VARIABLE)
        shown = gpus_shown(present, visible)
        if self.gpus is None or self.gpus <= len(shown):
            return shown[: self.gpus]
        if present and visible is not None:
            raise ValueError(
                f"gpus (HOLDFAST_GPUS) is {self.gpus}: {VARIABLE} is {visible!r} and shows {len(shown)} of "
                f"the {len(present)} of this machine; set one of the two"
            )
        return tuple(range(self.gpus))  # who says it knows more than the driver's files, which may be hidden

    @property
    def prices(self) -> Prices:
        """Of this machine, as the only node there is."""
        per_hour = () if self.price_per_hour is None else (NodePrice(price=self.price_per_hour),)
        return Prices(currency=self.currency, per_hour=per_hour)

    @property
    def directory(self) -> DataDirectory:
        return DataDirectory(self.data_dir)


class ClusterSettings(BaseSettings):
    """Of the controller on Kubernetes. Each field can be given as HOLDFAST_<NAME>, or as its alias."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True, env_ignore_empty=True
    )

    kubeconfig: str | None = Field(
        default=None,
        validation_alias=AliasChoices("HOLDFAST_KUBECONFIG", "KUBECONFIG"),
        description="Of the cluster; by default the service account of the pod this runs in.",
    )
    listen_host: str = Field(default="0.0.0.0", min_length=1, description="Address to listen on.")
    listen_port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="0 takes any free port.")
    pod_settings: Path | None = Field(
        default=None, description="YAML file: what the pods of all jobs get (pod_settings.py)."
    )
    leader_election: str = Field(
        default="holdfast", min_length=1, description="Name of the Lease that says which controller acts."
    )
    pod_namespace: str = Field(
        default="default",
        validation_alias=AliasChoices("HOLDFAST_POD_NAMESPACE", "POD_NAMESPACE"),
        description="Where the Lease lies.",
    )
    pod_name: str = Field(
        default_factory=socket.gethostname,
        validation_alias=AliasChoices("HOLDFAST_POD_NAME", "POD_NAME"),
        description="Who holds the Lease.",
    )
    requests_per_second: float = Field(
        default=500.0, gt=0, description="Requests to the apiserver, on average; a job needs five to start."
    )
    burst: int = Field(default=1000, ge=1, description="Requests to the apiserver at once.")
    gpu_exporters: str | None = Field(
        default=None,
        pattern=r"^.+:[0-9]+$",
        description="host:port of the GPU exporters: a name that resolves to all; none: nobody looks whether "
        "jobs use their GPUs.",
    )
    gpu_look_seconds: float = Field(
        default=30.0, gt=0, description="Between two looks at whether jobs use their GPUs."
    )
    log_level: LogLevel = "info"
    log_format: Literal["auto", "console", "json"] = "auto"


def load_cluster_settings(**flags: Any) -> ClusterSettings:
    """Settings from flags (None: not given) and the environment. Raises SettingsError."""
    return _load(ClusterSettings, flags)


def load_settings(**flags: Any) -> Settings:
    """Settings from flags (None: not given) and the environment. Raises SettingsError."""
    return _load(Settings, flags)


S = TypeVar("S", bound=BaseSettings)


def _load(cls: type[S], flags: Mapping[str, Any]) -> S:
    try:
        return cls(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        faults = []
        for fault in error.errors(include_url=False):
            message = fault["msg"].removeprefix("Value error, ")
            if fault["loc"]:
                name = str(fault["loc"][0])
                default = cls.model_fields[name].default if name in cls.model_fields else None
                if fault["type"] == "string_pattern_mismatch" and default is not None:
                    message = f"write it like {default}, which is its default"
                message = f"{name} ({PREFIX}{name.upper()}) is {fault['input']!r}: {message}"
            faults.append(message)
        raise SettingsError("; ".join(faults)) from None


def unknown_names(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each `HOLDFAST_*` variable that nobody reads, with the nearest right name."""
    fields = (*Settings.model_fields, *ClusterSettings.model_fields)
    ours = {PREFIX + name.upper() for name in fields}
    trainer = {getattr(contract, name) for name in dir(contract) if name.startswith("ENV_")}
    sentences = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in ours | trainer | set(CLIENT_NAMES):
            near = difflib.get_close_matches(name, ours, n=1)
            sentences.append(f"{name} is no setting" + (f"; did you mean {near[0]}?" if near else ""))
    return sentences
