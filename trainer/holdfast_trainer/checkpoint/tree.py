"""A nested training state as named tensors plus a JSON skeleton, and back, exactly.

State dicts mix tensors with ints, floats, tuples, dicts with integer keys and numpy arrays (the RNG
of numpy). `pack` takes the tensors out, so that they can be staged and written as raw bytes, and
leaves tagged JSON behind; `unpack` restores the same types, but for kinds of dicts and tuples, which
`in_kind` takes from where they go. Floats survive: Python's repr is the shortest text that reads back to
the same bits.

A tensor that is sharded over the ranks (a DTensor, as FSDP2 makes it) stays in pieces: each rank packs its
own, under the tensor's name and `@RANK`, and the skeleton names all of them. `unpack` puts them together
again, so what was saved in shards loads as a whole tensor, into whatever; where just this rank's rows were
read, because nothing else is wanted, those are what is there. What a rank has of its own ("own") only marks
the place of such a tensor, which stands in what is shared: `join` puts it there.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .errors import UnsupportedState
from .tensorfile import DTYPES, RESERVED

_TAGS = ("$tensor", "$shards", "$elsewhere", "$array", "$scalar", "$tuple", "$dict")
_SHARD = re.compile(r"@\d+$")
EXTRA = "_extra_state"
"""How torch ends the names of what a module gives by `get_extra_state`, which may be no tensor."""


def packed_bytes(state: Any) -> int:
    """What this rank writes of it. Raises UnsupportedState."""
    return sum(tensor.numel() * tensor.element_size() for tensor in pack(state)[1].values())


def pack(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(skeleton, tensors by dotted path). Nothing is copied but tensors of which the memory is conjugate, and
    arrays that torch cannot share.

    Raises UnsupportedState naming the path of a value of any other type.
    """
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, path: str) -> str:
        if tensor.is_meta:
            raise UnsupportedState(
                f"{path}: a tensor on the meta device has no values that could be saved; give it some first "
                "(model.to_empty(device=...), then its weights)"
            )
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            raise UnsupportedState(
                f"{path}: a {tensor.layout} tensor of {tensor.dtype} cannot be saved; "
                "make it dense, and of a plain number type"
            )
        tensor = tensor.resolve_conj().resolve_neg()  # else its memory is not what it holds
        name = _file_name(path)
        while name in tensors or name == RESERVED:  # {"a.b": x} and {"a": {"b": x}} have one path
            name += "'"
        tensors[name] = tensor
        return name

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor) and hasattr(value, "placements"):
            if path.startswith("own."):
                return {"$elsewhere": True}
            return {"$shards": _keep_shard(value, path, tensors)}
        if isinstance(value, torch.Tensor):
            return {"$tensor": keep(value.detach(), path)}
        if isinstance(value, np.ndarray):
            return {"$array": keep(_from_numpy(value, path), path)}
        if isinstance(value, Mapping):
            plain = all(isinstance(k, str) for k in value) and not any(tag in value for tag in _TAGS)
            if plain:
                return {k: visit(v, f"{path}.{k}" if path else k) for k, v in value.items()}
            for key in value:
                if not isinstance(key, str | int):
                    raise UnsupportedState(f"{path}: key {key!r} is a {type(key).__name__}, not str or int")
            return {"$dict": [[k, visit(v, f"{path}.{k}")] for k, v in value.items()]}
        if isinstance(value, tuple):
            return {"$tuple": [visit(v, f"{path}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, list):
            return [visit(v, f"{path}.{i}") for i, v in enumerate(value)]
        # Before Python's own, of which float64 is one: as that, it would round otherwise beside float32.
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            return {"$scalar": [value.dtype.str, value.item()]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise UnsupportedState(
            f"{path}: a {type(value).__name__} cannot be saved; "
            "keep tensors, numbers, strings, lists and dicts"
        )

    return visit(state, ""), tensors


def is_shard(name: str) -> bool:
    """Whether a tensor of this name is one rank's piece of a larger one, for that rank alone to write."""
    return _SHARD.search(name) is not None


def shard_rows(total: int, rank: int, ranks: int) -> range:
    """Which rows of dimension 0 are `rank`'s where `total` are cut over so many: as torch.chunk cuts them."""
    size = -(-total // ranks)
    begin = min(rank * size, total)
    return range(begin, min(begin + size, total))


def rows_wanted(rows: Mapping[str, int], rank: int, ranks: int) -> dict[str, range]:
    """Of each piece the rows that `rank` needs where the tensors are cut anew over `ranks`.

    `rows`: how many each piece has, by name; the pieces of a tensor are numbered from 0. Pure.
    """
    pieces: dict[str, list[str]] = {}
    for name in sorted(rows, key=lambda name: int(name.rpartition("@")[2])):
        pieces.setdefault(name.rpartition("@")[0], []).append(name)
    wanted = {}
    for names in pieces.values():
        mine, first = shard_rows(sum(rows[name] for name in names), rank, ranks), 0
        for name in names:
            begin = min(max(mine.start - first, 0), rows[name])
            wanted[name] = range(begin, max(begin, min(mine.stop - first, rows[name])))
            first += rows[name]
    return wanted


def _keep_shard(tensor: Any, path: str, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Keep this rank's piece of a DTensor; returns the names of all pieces, in order along dimension 0."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1 or not placements[0].is_shard(dim=0):
        raise UnsupportedState(
            f"{path}: a tensor placed as {placements} cannot be saved; "
            "shard it along dimension 0 over all ranks"
        )
    names = [f"{_file_name(path)}@{rank}" for rank in range(mesh.size())]
    mine = names[mesh.get_local_rank()]
    if mine in tensors:
        raise UnsupportedState(f"{path}: its piece {mine!r} has the name of another tensor; rename one")
    tensors[mine] = tensor.detach().to_local()
    return names


def _file_name(path: str) -> str:
    """ASCII, for the header of a file is read by more than Python: a lone surrogate is no text there."""
    return path.encode("ascii", "backslashreplace").decode()


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    masked = sys.modules.get("numpy.ma")  # who has one has imported it; that takes as long as many a save
    if masked is not None and isinstance(array, masked.MaskedArray):  # it would come back without its mask
        raise UnsupportedState(f"{path}: a masked array cannot be saved; keep its data and its mask")
    if array.flags.writeable:  # torch warns of other memory
        with suppress(TypeError, ValueError):
            return torch.from_numpy(array)
    try:
        # torch wants memory that it may write to, in the machine's own byte order, with positive strides.
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=True))
    except (TypeError, ValueError) as error:
        raise UnsupportedState(
            f"{path}: a numpy array of {array.dtype} cannot be saved; keep numbers and booleans"
        ) from error


@dataclass(frozen=True)
class Piece:
    """Of a tensor in shards, this rank's rows."""

    tensor: torch.Tensor
    rows: int
    """Of all ranks together."""


class Elsewhere:
    """In what a rank has of its own, the place of a tensor that is in shards."""


def join(own: Any, shared: Any) -> Any:
    """`own`, with the tensors that are in shards put where `shared`, the same state as rank 0 has it, has
    them."""
    return side_by_side(own, shared, lambda mine, theirs: theirs if isinstance(mine, Elsewhere) else mine)


def in_kind(state: Any, live: Any) -> Any:
    """`state`, which was saved, in containers of the kinds that `live`, the same state as it is now, has in
    their places, and its tensors on the devices of those there, and as they lie in memory: to a checkpoint
    all mappings are dicts, all tuples alike, and all tensors rows on the CPU. A Counter that came back as a
    dict would miss the first key that is new to it, and an average of weights could take in none on a GPU."""

    def kind(container: Any, like: Any) -> Any:
        if isinstance(like, defaultdict):
            return defaultdict(like.default_factory, container)
        if type(like) in (Counter, OrderedDict):
            return type(like)(container)
        if isinstance(container, tuple) and hasattr(like, "_make") and len(like) == len(container):
            return like._make(container)
        return container

    return side_by_side(state, live, _beside, kind)


def _beside(value: Any, like: Any) -> Any:
    if not isinstance(value, torch.Tensor) or type(like) not in (torch.Tensor, torch.nn.Parameter):
        return value
    return laid_out_like(value.to(like.device), like)


def laid_out_like(value: Any, parameter: torch.Tensor) -> Any:
    """`value` in memory as `parameter` is, where it has its shape: a checkpoint has all in rows, and a fused
    optimizer goes through both as they lie. It would give weights in channels_last the moments of others."""
    plain = type(value) is torch.Tensor and value.layout is torch.strided
    if not plain or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).detach().copy_(value)


def side_by_side(
    state: Any,
    other: Any,
    leaf: Callable[[Any, Any], Any],
    container: Callable[[Any, Any], Any] = lambda made, other: made,
) -> Any:
    """`state` with what `leaf` makes of each value in its containers and of what `other` has in its place, of
    None where that has none; `container` likewise of each container, once what is in it is made."""
    if isinstance(state, dict):
        there = other if isinstance(other, Mapping) else {}
        made = {key: side_by_side(value, there.get(key), leaf, container) for key, value in state.items()}
        return container(made, other)
    if isinstance(state, list | tuple):
        among = other if isinstance(other, list | tuple) and len(other) == len(state) else [None] * len(state)
        pairs = zip(state, among, strict=True)
        return container(type(state)(side_by_side(*pair, leaf, container) for pair in pairs), other)
    return leaf(state, other)


def unpack(
    skeleton: Any, tensors: MutableMapping[str, torch.Tensor], *, cut: Mapping[str, int] | None = None
) -> Any:
    """The state that `pack` took apart. `cut`: of tensors in shards, `tensors` has this rank's rows alone, in
    one piece or several, and gives them away: that nothing is there twice. It says how many rows each piece
    had, by name."""
    if isinstance(skeleton, dict):
        if len(skeleton) == 1:
            tag, body = next(iter(skeleton.items()))
            if tag == "$tensor":
                return tensors[body]
            if tag == "$shards":
                if cut is None:
                    return torch.cat([tensors[name] for name in body])
                kept = [tensors.pop(name) for name in body if name in tensors]
                filled = [piece for piece in kept if len(piece)] or kept[:1]
                mine = torch.cat(filled) if len(filled) > 1 else filled[0]
                return Piece(mine, sum(cut[name] for name in body))
            if tag == "$elsewhere":
                return Elsewhere()
            if tag == "$array":
                return tensors[body].numpy()
            if tag == "$scalar":
                return np.dtype(body[0]).type(body[1])
            if tag == "$tuple":
                return tuple(unpack(v, tensors, cut=cut) for v in body)
            if tag == "$dict":
                return {k: unpack(v, tensors, cut=cut) for k, v in body}
        return {k: unpack(v, tensors, cut=cut) for k, v in skeleton.items()}
    if isinstance(skeleton, list):
        return [unpack(v, tensors, cut=cut) for v in skeleton]
    return skeleton
