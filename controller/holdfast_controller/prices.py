"""What nodes cost an hour, as whoever pays for them says. Nothing here is guessed: no price, no figure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .spec import FrozenModel


class NodePrice(FrozenModel):
    """Of the nodes that fit; what is not given fits all."""

    instance_type: str = Field(
        default="", description="As the label node.kubernetes.io/instance-type has it."
    )
    capacity: Literal["Spot", "OnDemand"] | None = Field(default=None, description="Spot or OnDemand.")
    price: float = Field(gt=0, allow_inf_nan=False, description="Of the whole node, for an hour.")


class Prices(FrozenModel):
    """Of all nodes; the first entry that fits a node counts."""

    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$", description="ISO 4217.")
    per_hour: tuple[NodePrice, ...] = ()

    def of(self, instance_type: str, capacity: str | None) -> float | None:
        """Of a whole node, for an hour; None where no entry fits."""
        for entry in self.per_hour:
            if entry.instance_type in ("", instance_type) and entry.capacity in (None, capacity):
                return entry.price
        return None
