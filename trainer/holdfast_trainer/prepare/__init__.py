"""Text to token shards: `python -m holdfast_trainer prepare`. Never imports torch.

The corpus is cut into small units whose borders depend on the files alone (`corpus`). Worker
processes encode units, results are taken in order and appended to shards (`store`), and the place
reached is recorded durably every few seconds, so a run that was killed goes on from there and ends
with the same bytes. `build` puts the parts together; `index.json`, written last, says it is complete.
"""

from __future__ import annotations

from .build import prepare
from .command import main
from .corpus import PrepareError, Request

__all__ = ["PrepareError", "Request", "main", "prepare"]
