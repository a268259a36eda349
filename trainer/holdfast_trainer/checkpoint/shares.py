"""Who writes what: state that all ranks hold alike is written once, and its tensors are shared out.

Every rank computes the same answer from names and sizes, so nobody has to ask: the largest tensor goes to
the rank with the least to write so far (Graham's LPT rule, SIAM J. Appl. Math. 17(2), 1969, which stays
within 4/3 of the best division).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping


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
