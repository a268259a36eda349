"""Whether this machine can have the kernels of layers.cpp."""

from __future__ import annotations

import platform
import shutil

import pytest

from holdfast_trainer import cpuinfo, native

HERE = native.level(cpuinfo.read(), platform.machine())

needs_them = pytest.mark.skipif(
    not HERE or shutil.which("g++") is None, reason="needs g++, and a CPU of x86 with AVX2"
)
