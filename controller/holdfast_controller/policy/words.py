"""What of a job no process can be started with, whatever runs it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_controller.jobs import Spec

from .quantity import quantity

LEAST_MEMORY = 2**20
"""Bytes. Who asks for less has left out the unit: no Python starts in it."""


def unstartable(spec: Spec, longest: int | None = None) -> tuple[str, ...]:
    """A sentence for each, with its key; () where there is none. `longest`: bytes that the kernel takes of a
    word, the NUL behind it among them."""
    found = []
    for key, word in _words(spec):
        size = len(word.encode("utf-8", "surrogatepass"))
        if "\0" in word:
            found.append(
                f"{key} has a NUL character in it, with which no process can be started: leave it out"
            )
        elif longest is not None and size >= longest:
            found.append(
                f"{key} is of {size} bytes, and no process can be started with more than {longest - 1}: put "
                "it into spec.config, or into a file"
            )
    return tuple(found)


def too_little_memory(spec: Spec) -> tuple[str, ...]:
    """Likewise, where a replica is held to what it asks for."""
    memory = spec.resources.memory
    if memory is None or quantity(memory) >= LEAST_MEMORY:
        return ()
    return (f"spec.resources.memory is {memory}, in which no replica can start: write the unit, as in 64Gi",)


def _words(spec: Spec) -> Iterator[tuple[str, str]]:
    for index, word in enumerate(spec.command):
        yield f"spec.command[{index}]", word
    for name, value in spec.env.items():
        yield f"spec.env.{name}", f"{name}={value}"
    if spec.working_dir is not None:
        yield "spec.workingDir", spec.working_dir
