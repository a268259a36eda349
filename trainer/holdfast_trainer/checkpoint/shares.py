"""Who writes what: state that all ranks hold alike is written once, and its tensors are shared out.

Every rank computes the same answer from names and sizes, so nobody has to ask: the largest tensor goes to
the rank with the least to write so far (Graham's LPT rule, SIAM J. Appl. Math. 17(2), 1969, which stays
within 4/3 of the best division).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import Any

import torch

from .tree import is_shard, pack


def share_out(sizes: Mapping[str, int], world_size: int, rank_0_only: Collection[str] = ()) -> dict[str, int]:
    """The rank that writes each name; `rank_0_only` are names of which rank 0's value counts."""
    owners = {name: 0 for name in sizes if name in rank_0_only}
    loads = [(sum(sizes[name] for name in owners) if rank == 0 else 0, rank) for rank in range(world_size)]
    heapq.heapify(loads)
    for name in sorted(sizes.keys() - owners.keys(), key=lambda n: (-sizes[n], n)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners


def part_of(
    shared: Any, own: Any, rank_0_only: Collection[str] | None, rank: int, world_size: int
) -> tuple[Any, dict[str, torch.Tensor]]:
    """What this rank writes of a state: (skeleton, tensors). See `Saver.save`. Raises UnsupportedState."""
    if rank != 0 and rank_0_only is None:
        shared = None
    skeleton, tensors = pack({"own": own, "shared": shared})
    if rank_0_only is not None and world_size > 1:
        sizes = {
            n: t.numel() * t.element_size()
            for n, t in tensors.items()
            if n.startswith("shared.") and not is_shard(n)
        }
        # A prime marks a path that another tensor has too: which of them is meant is not known.
        unsure = {name for name in sizes if name.endswith("'")}
        owners = share_out(sizes, world_size, {*rank_0_only, *unsure})
        tensors = {n: t for n, t in tensors.items() if owners.get(n, rank) == rank}
    if rank != 0:
        del skeleton["shared"]
    return skeleton, tensors
