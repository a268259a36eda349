"""Who writes what: state that all ranks hold alike is written once, and its tensors are shared out.

Every rank computes the same answer from names and sizes of what is alike, and of nothing else, so nobody has
to ask: the largest tensor goes to the rank with the least to write so far (Graham's LPT rule, SIAM J. Appl.
Math. 17(2), 1969, which stays within 4/3 of the best division). What differs by rank each rank writes for
itself, rank 0's as what is shared. Should a tensor not be alike after all, ranks come to other answers, and a
tensor might be in no file: so each reports a hash of its answer, and rank 0 commits what agrees with its own.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from .tree import is_shard, pack


class Share(NamedTuple):
    """What one rank writes of a state."""

    skeleton: Any
    tensors: dict[str, torch.Tensor]
    division: str
    """Names who writes what, as this rank has it; empty where rank 0 writes all that is shared."""


def share_out(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The rank that writes each name."""
    owners = dict[str, int]()
    loads = [(0, rank) for rank in range(world_size)]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners


def part_of(shared: Any, own: Any, rank_0_only: Collection[str] | None, rank: int, world_size: int) -> Share:
    """This rank's of a state. See `Saver.save`. Raises UnsupportedState."""
    if rank != 0 and rank_0_only is None:
        shared = None
    skeleton, tensors = pack({"own": own, "shared": shared})
    division = ""
    if rank_0_only is not None and world_size > 1:
        once = {name: t for name, t in tensors.items() if name.startswith("shared.") and not is_shard(name)}
        # A prime marks a path that another tensor has too: which of them is meant is not known.
        sizes = {
            name: tensor.numel() * tensor.element_size()
            for name, tensor in once.items()
            if name not in rank_0_only and not name.endswith("'")
        }
        owners = share_out(sizes, world_size)
        division = hashlib.sha256(json.dumps(owners, sort_keys=True).encode()).hexdigest()
        writers = {**dict.fromkeys(once, 0), **owners}
        tensors = {name: tensor for name, tensor in tensors.items() if writers.get(name, rank) == rank}
    if rank != 0:
        del skeleton["shared"]
    return Share(skeleton, tensors, division)
