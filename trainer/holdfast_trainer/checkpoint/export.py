"""Weights out of a checkpoint, for other programs: safetensors, or a plain state_dict for torch.load.

A model is a part whose state is nothing but tensors by name, and what modules give by `get_extra_state`;
optimizers and scalers are not. Under DDP the names are those of the bare model, as checkpoints do not depend
on the wrapping.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..contract import exists, is_directory, is_file
from ..weights_file import save_weights_file
from .errors import CheckpointError
from .inspection import SHARED, Opened
from .tree import EXTRA, side_by_side

Format = Literal["safetensors", "torch"]


def models(parts: dict[str, Any]) -> list[str]:
    """Names of the parts that are models."""
    return [name for name, state in parts.items() if isinstance(state, dict) and _is_model(state)]


def _is_model(state: dict[str, Any]) -> bool:
    named = {name: isinstance(value, torch.Tensor) for name, value in state.items()}
    return any(named.values()) and all(tensor or name.endswith(EXTRA) for name, tensor in named.items())


def export(opened: Opened, out: Path, form: Format, *, part: str | None, everything: bool) -> str:
    """Write `out`, whole or not at all; returns what was exported, in words.

    Raises CheckpointError where the part is not there, or which one is meant is not clear.
    """
    if is_directory(out):
        raise CheckpointError(f"--out {out} is a directory; name a file, such as {out / 'gpt.safetensors'}")
    if exists(out) and not is_file(out):
        raise CheckpointError(f"--out {out} is there and is no file, which it would replace: name a file")
    shared = opened.shared()
    parts, versions = shared["parts"], None
    if everything:
        what, body = f"all of {', '.join(parts)}", _everything(opened, parts, form)
    else:
        name = _choose(parts, part)
        what, body = f"the weights of {name!r}", dict(parts[name])
        versions = shared.get("versions", {}).get(name)
        others = [key for key, value in body.items() if not isinstance(value, torch.Tensor)]
        if others and form == "safetensors":
            what += f" without {', '.join(others)}, which --format torch has"
            body = {key: value for key, value in body.items() if key not in others}
    file = Path(os.path.realpath(out))  # what a link leads to, as /dev/stdout does, not the link
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        if form == "safetensors":
            metadata = {"format": "pt", "holdfast_step": str(opened.manifest.step)}
            save_weights_file({key: value.contiguous() for key, value in body.items()}, temporary, metadata)
        else:
            with open(temporary, "wb") as stream:  # of a path torch would not say why it cannot be written
                torch.save(_versioned(side_by_side(body, None, _without_numpy), versions), stream)
        os.replace(temporary, file)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
    except Exception as error:  # the library wraps what the file system said, or fails for it once more
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(f"{out} cannot be written: {getattr(cause, 'strerror', cause)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return what


def _versioned(state: dict[str, Any], versions: dict[str, int] | None) -> dict[str, Any]:
    """A model's state that tells its modules of which versions it is, as that of `Module.state_dict` does."""
    if versions is None:
        return state
    paths = {
        ".".join(words[:count]) for words in (n.split(".") for n in state) for count in range(len(words))
    }
    whole: Any = OrderedDict(state)
    whole._metadata = {path: {"version": versions.get(path, 1)} for path in sorted(paths)}
    return whole  # type: ignore[no-any-return]


def _without_numpy(value: Any, _: object) -> Any:
    """As torch.load(weights_only=True) takes it."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return value.item() if isinstance(value, np.generic) else value


def _everything(opened: Opened, parts: dict[str, Any], form: Format) -> dict[str, Any]:
    if form == "torch":
        return parts
    prefix = f"{SHARED}.parts."
    names = [name for name in opened.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): opened.tensor(name) for name in names}


def _choose(parts: dict[str, Any], part: str | None) -> str:
    found = models(parts)
    if part is not None:
        if part not in found:
            raise CheckpointError(
                f"--part {part}: no model of that name; models are {', '.join(found) or 'none'}, "
                f"all parts are {', '.join(parts)}. --all exports everything"
            )
        return part
    if len(found) != 1:
        raise CheckpointError(
            f"which of {', '.join(found)} is meant? Say --part NAME"
            if found
            else f"no part of {', '.join(parts)} is a model; --all exports everything"
        )
    return found[0]
