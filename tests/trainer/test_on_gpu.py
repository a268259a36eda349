"""On a real GPU, where there is one: a training under torchrun is killed and given notice, and ends with the
bits of its twin that nobody touched; tune says what only a GPU has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from gangs import History
from gpt_runs import write_config
from gpus import apart, gpu
from processes import Processes
from waiting import wait_until

from holdfast_controller.local.ports import free_port
from holdfast_trainer.contract import RunDir

__all__ = ["gpu"]

pytestmark = pytest.mark.slow

STEPS = 600
"""Of which enough are left when one of the first hundreds is hit."""


@dataclass
class Runs:
    """Runs of one configuration, an attempt at a time, as the engines start them: torchrun, a forked rank.
    Several replicas share the GPU."""

    processes: Processes
    path: Path
    config: Path
    words: tuple[str, ...]
    env: Mapping[str, str]
    replicas: int = 1

    def history(self, run: str) -> History:
        return History(RunDir(self.path / run))

    def start(self, run: str, attempt: int) -> list[subprocess.Popen[str]]:
        """A torchrun for each replica."""
        command = [sys.executable, "-m", "holdfast_trainer.torchrun", f"--nnodes={self.replicas}"]
        command += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        command += ["--monitor-interval=0.1", "--shutdown-timeout=60"]
        rank = ["--", "--die-with-parent", "--", sys.executable, "-m", "holdfast_trainer", "train"]
        rank += ["--config", str(self.config), *self.words]
        env = {
            "HOLDFAST_RUN_DIR": str(self.path / run),
            "HOLDFAST_ATTEMPT": str(attempt),
            "HOLDFAST_GRACE_SECONDS": "60",
            **self.env,
        }
        started = []
        for replica in range(self.replicas):
            words = [*command, f"--node-rank={replica}", *rank]
            own = {**env, **apart(replica)}
            with open(self.log(run, attempt, replica), "w") as log:
                started.append(self.processes.start(words, env=own, stdout=log, stderr=subprocess.STDOUT))
        return started

    def log(self, run: str, attempt: int, replica: int = 0) -> Path:
        return self.path / f"{run}-{attempt}-{replica}.log"

    def told(self, run: str, attempt: int) -> str:
        """The end of what each replica printed."""
        return "\n".join(
            f"--- replica {replica}\n{self.log(run, attempt, replica).read_text()[-3000:]}"
            for replica in range(self.replicas)
        )

    def reaches(self, run: str, attempt: int, step: int, started: list[subprocess.Popen[str]]) -> None:
        there = self.history(run)

        def is_there() -> bool:
            assert all(one.poll() is None for one in started), self.told(run, attempt)
            return there.last_step(attempt) >= step

        wait_until(is_there, f"step {step}; see {self.log(run, attempt)}")

    def finishes(self, run: str, attempt: int) -> dict[str, Any]:
        """Its stop line."""
        codes = [one.wait(600) for one in self.start(run, attempt)]
        assert codes == [0] * self.replicas, self.told(run, attempt)
        stop = self.history(run).stop(attempt)
        assert (stop["outcome"], stop["step"]) == ("finished", STEPS)
        return stop


def kill(started: list[subprocess.Popen[str]]) -> None:
    """All of the first replica; the others lose it."""
    first = psutil.Process(started[0].pid)
    for process in [*first.children(recursive=True), first]:
        process.kill()
    for one in started:
        one.wait(120)


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        (1, ("train.precision=fp32",)),
        (1, ("train.precision=bf16",)),
        (1, ("train.precision=fp16",)),
        (1, ("train.precision=bf16", "train.compile=true")),
        (2, ("train.precision=bf16",)),
        (2, ("train.precision=bf16", "train.parallel=fsdp")),
    ],
    ids=["fp32", "bf16", "fp16", "compiled", "ddp over nccl", "fsdp over nccl"],
)
def test_killed_and_given_notice_a_gpu_run_is_the_untouched_one(
    replicas: int, words: tuple[str, ...], gpu: dict[str, str], processes: Processes, tmp_path: Path
) -> None:
    # Its matrices are large enough to be copied while the next step computes.
    common = (f"train.steps={STEPS}", "train.micro_batch=6", "model.width=256")
    common += ("validation.every=100", "checkpoint.every=40")
    runs = Runs(processes, tmp_path, write_config(tmp_path), (*common, *words), gpu, replicas)
    twin = runs.finishes("twin", 1)

    killed = runs.start("run", 1)
    runs.reaches("run", 1, 100, killed)
    kill(killed)

    noticed = runs.start("run", 2)
    runs.reaches("run", 2, 250, noticed)
    noticed[0].send_signal(signal.SIGTERM)
    for one in noticed:
        one.wait(120)
    stop = runs.history("run").stop(2)
    assert (stop["outcome"], stop["durable_step"]) == ("interrupted", stop["step"]), "nothing is lost"

    last = runs.finishes("run", 3)
    assert runs.history("run").losses() == runs.history("twin").losses()
    assert runs.history("run").validations() == runs.history("twin").validations()
    assert last["digest"] == twin["digest"]
    assert "cuda" in runs.log("run", 3).read_text(), "it computed on the GPU"


CHOOSE = """
import json, sys, torch
from holdfast_trainer.exact_attention import choose
torch.use_deterministic_algorithms(True)
there = torch.device("cuda", 0)
cases = json.loads(sys.argv[1])
found = []
for dtype, q, kv_heads in cases:
    for joined in (True, False):
        found.append(choose(there, getattr(torch, dtype), tuple(q), kv_heads, joined=joined))
print(json.dumps(found))
"""
FIT = [
    ("bfloat16", (4, 12, 1024, 64), 12),
    ("float16", (4, 12, 1024, 64), 12),
    ("bfloat16", (2, 16, 2048, 128), 4),
    ("bfloat16", (4, 8, 4096, 128), 8),
    ("bfloat16", (2, 32, 4096, 128), 8),
    ("float16", (3, 4, 1000, 80), 1),
    ("bfloat16", (6, 4, 128, 64), 4),
]
"""Type, shape of the queries, heads of keys and values; the fourth and the fifth go in parts."""


def chosen(gpu: dict[str, str], cases: list[tuple[str, tuple[int, ...], int]]) -> list[str]:
    env = {**os.environ, **gpu, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-c", CHOOSE, json.dumps(cases)]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    found: list[str] = json.loads(said.stdout)
    return found


@pytest.fixture(scope="module")
def exact(gpu: dict[str, str]) -> dict[str, str]:
    lacking = chosen(gpu, [FIT[-1]])[0]
    if lacking.startswith(("it is for", "pip install")):
        pytest.skip(f"needs cuDNN's deterministic attention: {lacking}")
    return gpu


def test_attention_repeats_its_bits_and_agrees_with_another_kernel(exact: dict[str, str]) -> None:
    assert set(chosen(exact, FIT)) == {""}
    large, _, odd, _, wide, _ = chosen(
        exact,
        [
            ("bfloat16", (1, 32, 32_768, 128), 32),
            ("bfloat16", (4, 4, 256, 68), 4),
            ("float32", (4, 4, 256, 64), 4),
        ],
    )
    assert large == "the scores of 32768 x 32768 tokens take more than 512 MiB"
    assert odd == "heads of 68 are no multiple of 8 up to 128"
    assert wide == "it is for Hopper GPUs, in bf16 or fp16"


@pytest.mark.parametrize(
    "words", [(), ("train.compile=true",), ("model.family=llama", "model.kv_heads=2", "model.bias=false")]
)
def test_a_gpu_run_with_exact_attention_is_the_untouched_one(
    words: tuple[str, ...], exact: dict[str, str], processes: Processes, tmp_path: Path
) -> None:
    sizes = ("model.dropout=0", "model.context=128", "model.width=256", "model.heads=4")
    common = (f"train.steps={STEPS}", "train.precision=bf16", "train.micro_batch=6", "checkpoint.every=40")
    runs = Runs(processes, tmp_path, write_config(tmp_path), (*common, *sizes, *words), exact)
    twin = runs.finishes("twin", 1)
    told = runs.log("twin", 1).read_text()
    assert "attention by cudnn" in told
    assert ("a fused loss" in told) == (words != ("train.compile=true",))
    killed = runs.start("run", 1)
    runs.reaches("run", 1, 100, killed)
    kill(killed)
    last = runs.finishes("run", 2)
    assert runs.history("run").losses() == runs.history("twin").losses()
    assert last["digest"] == twin["digest"]


CHOOSE_LOSS = """
import json, sys, torch
from holdfast_trainer.fused_loss import choose
there = torch.device("cuda", 0)
print(json.dumps([choose(there, getattr(torch, dtype), size) for dtype, size in json.loads(sys.argv[1])]))
"""


def test_the_fused_loss_repeats_its_bits_and_agrees_with_torchs(gpu: dict[str, str]) -> None:
    cases = [(dtype, size) for dtype in ("bfloat16", "float16") for size in (2, 256, 50_257, 50_304, 128_256)]
    command = [sys.executable, "-c", CHOOSE_LOSS, json.dumps([*cases, ("float32", 256)])]
    said = subprocess.run(command, env={**os.environ, **gpu}, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    *fit, wide = json.loads(said.stdout)
    assert wide == "it is for NVIDIA GPUs from Ampere on, in bf16 or fp16"
    if fit[0] == wide:
        pytest.skip(f"needs a GPU with the fused loss: {wide}")
    assert set(fit) == {""}


PRODUCTS = """
import hashlib, sys, torch
from holdfast_trainer.determinism import choose_kernels, make_deterministic
there = torch.device("cuda", 0)
if sys.argv[1] == "once":
    choose_kernels("strict", there)
else:
    make_deterministic(strict=True)
drawn, bits = torch.Generator(there).manual_seed(1), hashlib.sha256()
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for left, inner, right in ((4096, 768, 3072), (768, 16_384, 768), (100, 50_257, 96), (64, 100_000, 64)):
        a = torch.randn(left, inner, device=there, generator=drawn).to(dtype)
        b = torch.randn(right, inner, device=there, generator=drawn).to(dtype)
        for product in (a @ b.t(), torch.nn.functional.linear(a, b, b[:, 0])):
            bits.update(product.view(torch.uint8).cpu().numpy().tobytes())
print(bits.hexdigest())
"""


def test_products_have_the_same_bits_however_often_torch_reads_what_makes_them_repeat(
    gpu: dict[str, str],
) -> None:
    def bits(reads: str) -> str:
        command = [sys.executable, "-c", PRODUCTS, reads]
        said = subprocess.run(command, env={**os.environ, **gpu}, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        return said.stdout

    assert bits("once") == bits("each time")


def test_tune_tells_what_tf32_buys(gpu: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast_trainer", "tune", str(write_config(tmp_path)), "-o=json"]
    command += ["--rounds=1", "--steps=1", "--seconds=0", "--no-compile", f"--out={tmp_path / 'out'}"]
    tuning = subprocess.run(command, env={**os.environ, **gpu}, capture_output=True, text=True, check=False)
    assert tuning.returncode == 0, tuning.stderr
    speeds = {row["name"]: row["median"] for row in json.loads(tuning.stdout)["rows"]}
    if "TF32" not in speeds:
        pytest.skip("needs a GPU with TF32: compute capability 8.0 (Ampere)")
    assert speeds["TF32"] > 0
    assert speeds["all on but TF32"] > 0
