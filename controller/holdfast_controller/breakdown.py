"""What a start was made of, and where it ran: the parts of an attempt's record that are figures of both.

The stages follow one another without a gap, so that those of a recovery add up to `recovery_seconds`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .spec import Model


class Breakdown(Model):
    """Seconds of each stage up to the end of the attempt's first step; None: not known, or there was none.

    The first three are of the end of the attempt before, and of no first attempt.
    """

    detect_seconds: float | None = Field(
        default=None,
        description="From the last sign of life of the attempt before until the loss was known.",
    )
    tear_down_seconds: float | None = Field(
        default=None, description="Until the last replica of it had ended, saving included."
    )
    wait_seconds: float | None = Field(
        default=None,
        description="Until this attempt was opened: a back-off, a suspension, else next to none.",
    )
    schedule_seconds: float | None = Field(
        default=None, description="Until every replica had its place on a node."
    )
    start_seconds: float | None = Field(
        default=None,
        description="Until rank 0's process began: volumes, images, containers, torchrun, which imports "
        "PyTorch for its ranks where it forks them.",
    )
    import_seconds: float | None = Field(default=None, description="What rank 0 itself imported.")
    rendezvous_seconds: float | None = Field(
        default=None, description="Until all ranks had found one another."
    )
    build_seconds: float | None = Field(
        default=None, description="Model and optimizer, compiled where asked."
    )
    load_seconds: float | None = Field(default=None, description="Of the checkpoint, verified.")
    first_step_seconds: float | None = Field(default=None, description="Until the first step was done.")

    def stages(self) -> dict[str, float]:
        """What is known, by the stage's name, in order."""
        return {
            name.removesuffix("_seconds"): seconds
            for name in Breakdown.model_fields
            if (seconds := getattr(self, name)) is not None
        }


class Whereabouts(Model):
    """The nodes of an attempt."""

    nodes: list[str] = Field(default_factory=list, description="Names, without repeats; the first 16.")
    capacity: dict[str, int] = Field(
        default_factory=dict, description="Replicas by what their node is: Spot, OnDemand, Unknown."
    )
    instance_types: dict[str, int] = Field(
        default_factory=dict,
        description="Replicas by their node's instance type, where it has a label for it.",
    )
    price_per_hour: float | None = Field(
        default=None,
        description="Of all replicas' shares of their nodes; None where one of the nodes has no price.",
    )
    currency: str | None = Field(default=None, description="Of pricePerHour; None where that is.")


RecoverySeconds = Annotated[
    float | None,
    Field(
        description="From the last sign of life of the attempt before to the end of this one's first step; "
        "None for the first attempt and after a suspension."
    ),
]
BreakdownOfStart = Annotated[
    Breakdown | None,
    Field(description="What the time up to the first step went into; once that is done."),
]
Placed = Annotated[Whereabouts | None, Field(description="The nodes it was placed on.")]
GoodputOfAttempt = Annotated[
    float | None,
    Field(
        description="Time it spent on steps that count / wall time from its start to its end, or to the "
        "newest progress while it runs; None of a program that tells nothing of its steps, and of an attempt "
        "that has not loaded what it goes on from."
    ),
]
CostOfAttempt = Annotated[
    float | None,
    Field(description="In whereabouts.currency, from its start to its end; None where a node has no price."),
]
