"""A training on a CPU has tcmalloc where the machine does, unless the user wants it otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fresh_command import TORCHRUN, text_of
from tests.cluster.errors import MissingTool
from tests.cluster.system import install

from holdfast_controller.local.ports import free_port
from holdfast_trainer.allocator import HUGE_PAGES, LIBRARY, MULTIARCH, PACKAGE, PRELOAD, library, preload


@pytest.fixture(scope="module")
def installed() -> Path:
    try:
        install({str(MULTIARCH / LIBRARY): PACKAGE})
    except MissingTool as error:
        pytest.skip(str(error))
    found = library()
    if found is None:
        pytest.skip("there is a GPU: the C library's malloc stays")
    return found


@pytest.mark.parametrize(
    "given",
    [
        {PRELOAD: ""},
        {PRELOAD: "/mine.so"},
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        {"MALLOC_ARENA_MAX": "2"},
    ],
)
def test_what_the_user_says_stays(given: dict[str, str]) -> None:
    environment = dict(given)
    assert not preload(environment, Path("/lib") / LIBRARY)
    assert environment == given


def test_it_is_taken_where_it_is_and_steps_are_done_on_the_cpu(tmp_path: Path) -> None:
    first, second, gpu = tmp_path / "lib64", tmp_path / "lib", tmp_path / "nvidiactl"
    assert library((first, second), (gpu,)) is None
    environment: dict[str, str] = {}
    assert not preload(environment, None)
    assert environment == {}
    second.mkdir()
    there = second / LIBRARY
    there.touch()
    assert library((first, second), (gpu,)) == there
    assert preload(environment, there)
    assert environment == {PRELOAD: str(there), HUGE_PAGES: "1"}
    assert not preload(environment, there), "once is enough"
    gpu.touch()
    assert library((first, second), (gpu,)) is None


def told(command: list[str], directory: Path, **given: str) -> str:
    """What a command prints whose environment says nothing of malloc but what is given."""
    return text_of(command, directory, (PRELOAD, HUGE_PAGES), **given)


def test_a_rank_has_what_torchrun_was_started_again_with(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "there = [line.split()[-1] for line in open('/proc/self/maps') if '/libtcmalloc' in line]\n"
        "print('rank has', *set(there) or ['none'], *sys.argv[1:])\n"
    )
    words = [*TORCHRUN, f"--master-port={free_port()}", f"--log-dir={tmp_path}", "--", "--tee", "--"]
    command = ["holdfast_trainer.torchrun", *words, sys.executable, str(program), "a b", "--c"]
    assert f"rank has {os.path.realpath(installed)} a b --c" in told(command, tmp_path)
    assert "rank has none a b --c" in told(command, tmp_path, **{PRELOAD: ""})


def test_a_command_is_started_again_and_does_what_it_was_told(installed: Path, tmp_path: Path) -> None:
    for given in ({}, {PRELOAD: ""}):
        assert "--gpu-memory" in told(["holdfast_trainer", "diagnose", "--help"], tmp_path, **given)


def test_what_a_rank_may_take_ends_where_its_address_space_does(tmp_path: Path) -> None:
    """Under `ulimit -v` a batch that takes 3 GB did not fit, "and a rank has 18.60"."""
    program = tmp_path / "program.py"
    program.write_text(
        "import resource, torch\n"
        "from holdfast_trainer.footprint import Footprint\n"
        "mapped = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20), -1))\n"
        "print('room', Footprint(torch.device('cpu')).room() >> 20)\n"
    )
    (said,) = (line for line in text_of(["program"], tmp_path, ()).splitlines() if line.startswith("room"))
    assert 128 < int(said.split()[1]) < 300


def test_what_is_freed_is_given_back_before_memory_is_measured(installed: Path, tmp_path: Path) -> None:
    """tune measures one batch size after another in one process, of which each finds what the last one left:
    with tcmalloc, which keeps that, the second had taken nothing."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from holdfast_trainer.footprint import Footprint, warm_up\n"
        "warm_up(torch.device('cpu'))\n"
        "for _ in range(2):\n"
        "    taken = Footprint(torch.device('cpu'))\n"
        "    blocks = [torch.ones(1 << 18) for _ in range(64)]\n"
        "    print('took', taken.peak() >> 20)\n"
        "    del blocks\n"
    )
    for given in ({PRELOAD: str(installed), HUGE_PAGES: "1"}, {PRELOAD: ""}):
        lines = text_of(["program"], tmp_path, (PRELOAD, HUGE_PAGES), **given)
        took = [int(line.split()[1]) for line in lines.splitlines() if line.startswith("took")]
        assert len(took) == 2
        assert all(56 < mebibytes < 90 for mebibytes in took), f"64 MiB each time: {took} {given}"


def test_files_that_the_kernel_takes_back_do_not_count_as_memory_that_was_taken(tmp_path: Path) -> None:
    """As it does where memory is short: the pages of libraries that were used go first."""
    (tmp_path / "library").write_bytes(bytes(128 << 20))
    program = tmp_path / "program.py"
    program.write_text(
        "import mmap, torch\n"
        "from holdfast_trainer.footprint import Footprint, warm_up\n"
        "warm_up(torch.device('cpu'))\n"
        "with open('library', 'rb') as file:\n"
        "    mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)\n"
        "taken = Footprint(torch.device('cpu'))\n"
        "pages = sum(mapped[::4096])\n"
        "blocks = [torch.ones(1 << 18) for _ in range(64)]\n"
        "taken.look()\n"
        "mapped.madvise(mmap.MADV_DONTNEED)\n"
        "print('took', taken.peak() >> 20)\n"
        "blocks += [torch.ones(1 << 18) for _ in range(64)]\n"
        "print('took', taken.peak() >> 20)\n"
    )
    lines = text_of(["program"], tmp_path, (PRELOAD,), **{PRELOAD: ""}).splitlines()
    first, second = (int(line.split()[1]) for line in lines if line.startswith("took"))
    assert 56 < first < 90
    assert 120 < second < 154
