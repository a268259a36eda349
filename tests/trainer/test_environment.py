"""What a run was computed with, as its checkpoints keep it."""

from __future__ import annotations

import pytest
import torch

from holdfast_trainer.cpuinfo import first, name
from holdfast_trainer.environment import describe_environment, differences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nmodel name\t: One\n\nprocessor\t: 1\nmodel name\t: Two\n", "One"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "0x41 0xd40"),
        ("", ""),
    ],
)
def test_the_processors_name(text: str, expected: str) -> None:
    assert name(first(text)) == expected


def test_this_process_says_its_processor_and_precision() -> None:
    told = describe_environment(torch.device("cpu"), torch.bfloat16)
    assert told["precision"] == "bf16"
    assert told["torch"] == torch.__version__
    assert told["threads"] == torch.get_num_threads()
    assert told["device"].startswith(f"cpu, {torch.backends.cpu.get_cpu_capability()}")


def test_what_is_not_as_it_was_is_named_and_nothing_else() -> None:
    then = {"torch": "2.14", "device": "cpu, AVX512, One", "threads": 2, "of old": 1}
    assert differences(then, then) == []
    assert differences(
        then, {"torch": "2.15", "device": "cpu, AVX2, Two", "threads": 2, "precision": "fp32"}
    ) == [
        "torch: 2.14 -> 2.15",
        "device: cpu, AVX512, One -> cpu, AVX2, Two",
    ]
