"""torch.compile with a way back: what does not compile runs as it is written, on all ranks alike.

torch compiles when a function is first called, so a failure would meet the first step, after other ranks
have begun to wait for its gradients. Here a probe is run before anything is shared out: forward, backward,
and what validation runs. Where it fails on any rank, all take the eager functions back and one line says
why; ranks that computed in two ways would round in two ways.

One process compiles the whole model. With several ranks the blocks are compiled one by one: backward then
hands out gradients block by block, so that their reduction overlaps with what is left of it; and as blocks
share their code, there is only one to compile. FSDP makes a class of its own of what it cuts, and gathers its
weights in another type: so the probe runs a block that FSDP has in hand as it will have the others, but that
each rank has whole, as one in which ranks wait for each other would hang where one of them fails.

What was compiled stays in the run directory, so that later attempts find it. A cache directory that was
named already (TORCHINDUCTOR_CACHE_DIR) is left as it is.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from .deferred import import_compiler
from .faults import is_out_of_memory
from .parallel import Gang, first_fault

log = logging.getLogger("holdfast")

WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""What torch's modes that record CUDA graphs are without them."""

CACHE = "TORCHINDUCTOR_CACHE_DIR"
CUT_SHORT = "a notice ended the compiler"


def mode_that_holds(mode: str | None, gang: Gang, micro_batches: int) -> str | None:
    """`mode`, or what it is without CUDA graphs where these would end the run of such a gang.

    A graph writes to the same memory at each call. So the gradients of a micro-batch, which autograd leaves
    where the graph put them, are gone with the next one; and so is what a block has handed to the next, where
    blocks that are compiled one by one have no backward to wait for, as in validation.
    """
    alone = gang.world_size == 1 and micro_batches == 1
    if gang.device.type != "cuda" or mode not in WITHOUT_GRAPHS or alone:
        return mode
    used = WITHOUT_GRAPHS[mode]
    if gang.rank == 0:
        why = f"{gang.world_size} ranks" if gang.world_size > 1 else f"{micro_batches} micro-batches a step"
        log.warning("train.compile=%s is used as %s: CUDA graphs do not go with %s", mode, used, why)
    return used


def compile_or_eager(
    parts: Sequence[nn.Module],
    mode: str | None,
    probe: Callable[[], None],
    gang: Gang,
    cache: Path | None,
    noticed: Callable[[], bool] = lambda: False,
) -> str:
    """Compile the forward functions of `parts` in place; says why where all went back to eager. Collective.

    `noticed`: this rank was told to end. torchrun signals its process group, and so the C++ compiler too:
    what that leaves undone is no failure, and not said, for the gang stops before its first step.

    `cache` is where what was compiled stays, torch's own place where None. `probe` calls the parts in every
    way in which they will be called. Raises what it raised where memory ran out: eager needs no less.
    """
    # Imported first: it names and makes a directory of its own then, and where that fails, for good.
    import_compiler()
    unnamed = ("", importlib.import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir())
    if cache is not None and os.environ.get(CACHE, "") in unnamed:
        os.environ[CACHE] = str(cache)
    began = time.monotonic()
    fault = ""
    try:
        for part in parts:
            part.forward = torch.compile(part.forward, mode=mode)
        probe()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        fault = CUT_SHORT if noticed() else f"{type(error).__name__}: {_first_line(error)}"
    told = gang.gather(fault)
    failed = first_fault(told)
    if failed:
        for part in parts:
            vars(part).pop("forward", None)  # the instance's: the class has the one that was written
        torch.compiler.reset()
        if CUT_SHORT in told:
            if gang.rank == 0:
                log.info("%s on rank %d: no step is done without it", CUT_SHORT, told.index(CUT_SHORT))
            return ""
        if gang.rank == 0:
            log.warning("torch.compile failed, all ranks go on without it (%s)", failed)
        return failed
    if gang.rank == 0:
        log.info("compiled in %.1f s", time.monotonic() - began)
    return ""


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
