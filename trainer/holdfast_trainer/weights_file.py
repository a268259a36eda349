"""A file of weights for other programs, in the safetensors format."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_weights_file(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write `path`, for all to read whom the umask lets: the library's own files are their owner's alone.

    Raises OSError or SafetensorError.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, dict(metadata))
    with suppress(OSError):  # some file systems keep no modes
        path.chmod(mode)
