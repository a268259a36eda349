"""layers.cpp as a library: who gets one, from where, and what is said where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compiled_layers import HERE, needs_them

from holdfast_trainer import native
from holdfast_trainer.native import Library, Unavailable, compile_to, file_name, level

AS_RELEASED = native.OPTIONS
V3 = "avx2 bmi1 bmi2 f16c fma movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who has started nothing yet, on a machine that ships nothing. How fast what is compiled
    computes is not looked at here: it takes a quarter of the time."""
    monkeypatch.setattr(native, "OPTIONS", tuple(word.replace("-O3", "-O0") for word in AS_RELEASED))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    return tmp_path / "cache/holdfast/kernels"


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """A g++ that does what they say."""
    compiler = tmp_path / "bin/g++"
    compiler.parent.mkdir()
    compiler.write_text("\n".join(("#!/bin/sh", *lines, "")))
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")


def works(library: Library) -> bool:
    x, y = torch.tensor([0.0, 1.0]), torch.empty(2)
    library.call("gelu_float32", x, y, 2)
    return torch.allclose(y, torch.nn.functional.gelu(x, approximate="tanh"))


@pytest.mark.parametrize(
    ("text", "machine", "expected"),
    [
        (f"flags\t\t: fpu {V4}\n", "x86_64", "x86-64-v4"),
        (f"flags\t\t: fpu {V3} avx512f\n", "x86_64", "x86-64-v3"),
        ("flags\t\t: fpu sse4_2\n", "x86_64", ""),
        (f"flags\t\t: fpu {V4}\n", "aarch64", ""),
        ("", "x86_64", ""),
    ],
)
def test_it_is_compiled_for_what_the_processor_has(text: str, machine: str, expected: str) -> None:
    assert level(text, machine) == expected


@needs_them
def test_the_first_start_compiles_it_and_the_next_ones_need_no_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = native.library()
    assert works(first)
    (kept,) = cache.iterdir()
    assert kept.name == file_name(HERE)
    assert cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.library().digest == first.digest


@needs_them
def test_the_same_compiler_makes_the_same_library(tmp_path: Path) -> None:
    """Its digest stands for its bits."""
    for name in ("one", "another"):
        (tmp_path / name).mkdir()
        compile_to(tmp_path / name / "layers.so", HERE)
    one, another = (Library(tmp_path / name / "layers.so") for name in ("one", "another"))
    assert one.digest == another.digest


@pytest.mark.usefixtures("no_compiler", "cache")
@pytest.mark.skipif(not HERE, reason="needs a CPU of x86 with AVX2")
def test_without_a_compiler_it_says_what_to_install() -> None:
    with pytest.raises(Unavailable, match=r"^it needs a C\+\+ compiler once: apt-get install g\+\+$"):
        native.library()


@needs_them
def test_what_the_compiler_refuses_is_told(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main() { return nothing; }\n")
    monkeypatch.setattr(native, "SOURCE", broken)
    with pytest.raises(Unavailable, match=r"g\+\+ failed with 1: broken\.cpp:1:21: error: .*nothing"):
        native.library()
    assert list(cache.iterdir()) == [], "nothing is left of it"


@pytest.mark.usefixtures("cache")
@needs_them
def test_of_a_linker_that_fails_the_cause_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it ends on a disk that is full: what it writes to here takes nothing."""
    stand_in(tmp_path, monkeypatch, f'exec {shutil.which("g++")} "$@" -o /dev/full')
    with pytest.raises(Unavailable, match=r"g\+\+ failed with 1: .*ld: .*No space left on device$"):
        native.library()


@needs_them
def test_a_compiler_from_before_the_levels_had_names_will_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GCC 8 of RHEL 8."""
    usual = native.library()
    (cache / file_name(HERE)).unlink()
    stand_in(
        tmp_path,
        monkeypatch,
        'case "$*" in *-march=x86-64-v*) echo "error: bad value for -march=" >&2; exit 1; esac',
        f'exec {shutil.which("g++")} "$@"',
    )
    assert native.library().digest == usual.digest


@needs_them
def test_a_compiler_that_hangs_is_waited_for_no_longer_than_a_minute(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.setattr(native, "TIMEOUT", 0.2)
    with pytest.raises(Unavailable, match=r"bin/g\+\+ was not done after 0 s"):
        native.library()
    assert list(cache.iterdir()) == []


@needs_them
def test_a_file_that_a_full_disk_cut_short_is_made_anew(cache: Path) -> None:
    cache.mkdir(parents=True)
    cut = cache / file_name(HERE)
    cut.write_bytes(b"\x7fELF and no more")
    assert works(native.library())
    assert len(cut.read_bytes()) > 1000
    assert native.library().digest == Library(cut).digest


@needs_them
@pytest.mark.parametrize("whose", ["anybody may write there", "it is somebody else's"])
def test_nothing_is_taken_from_where_others_may_write(
    whose: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    compile_to(cache / file_name(HERE), HERE)
    put = cache / file_name(HERE)
    put.write_bytes(put.read_bytes() + b"and what somebody wants to be run")
    if whose == "anybody may write there":
        cache.chmod(0o777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    found = native.library()
    assert works(found)
    assert found.digest != Library(put).digest


@needs_them
@pytest.mark.parametrize("where", ["/dev/null", "/proc"])
def test_a_user_with_no_place_for_it_has_it_compiled_at_each_start(
    where: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a home that is read-only."""
    monkeypatch.setenv("XDG_CACHE_HOME", where)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert works(native.library())
    assert not cache.exists()
    assert not list(tmp_path.glob("holdfast-kernels-*")), "nothing is left of it"
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    with pytest.raises(Unavailable, match=r"^there is no place to compile it in: .*/proc"):
        native.library()


@needs_them
def test_a_cache_that_is_named_from_where_somebody_is_works(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert works(native.library())
    assert [path.name for path in cache.iterdir()] == [file_name(HERE)]


@needs_them
@pytest.mark.parametrize("umask", [0, 0o077])
def test_all_may_run_what_is_compiled_and_its_owner_alone_may_write_it(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        compile_to(tmp_path / "layers.so", HERE)
    finally:
        os.umask(before)
    assert (tmp_path / "layers.so").stat().st_mode & 0o777 == 0o755


@needs_them
def test_what_cannot_be_loaded_from_its_place_is_told_once_with_the_remedy(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a home that is mounted noexec."""
    stand_in(tmp_path, monkeypatch, 'while [ "$1" != -o ]; do shift; done', 'echo "no library" >"$2"')
    with pytest.raises(Unavailable) as told:
        native.library()
    path = cache / file_name(HERE)
    assert str(told.value) == f"{path}: file too short; XDG_CACHE_HOME can name another place for it"


@needs_them
def test_an_image_has_it_for_each_kind_of_processor(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "OPTIONS", AS_RELEASED)
    shipped = tmp_path / "shipped"
    command = [sys.executable, "-m", "holdfast_trainer.native", str(shipped)]
    subprocess.run(command, check=True, timeout=120)
    assert {path.name for path in shipped.iterdir()} == {file_name(name) for name in native.LEVELS}
    monkeypatch.setattr(native, "SHIPPED", shipped)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert works(native.library())
    assert not cache.exists()


@needs_them
@pytest.mark.usefixtures("cache", "no_compiler")
def test_why_the_images_own_cannot_be_loaded_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was cut short, or is from a newer system: that there is no compiler was told alone."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / file_name(HERE)).write_bytes(b"\x7fELF and no more")
    monkeypatch.setattr(native, "SHIPPED", shipped)
    why = rf"^{shipped}/layers-.*: file too short; to compile another it needs a C\+\+ compiler once"
    with pytest.raises(Unavailable, match=why):
        native.library()


@needs_them
@pytest.mark.usefixtures("cache")
def test_two_pools_of_threads_are_not_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for one another in a spin, on the same cores."""
    monkeypatch.setattr(native, "_thread_pools", lambda: {"/one/libgomp.so.1", "/other/libomp.so.5"})
    with pytest.raises(Unavailable, match=r"threads would be others than PyTorch's"):
        native.library()
