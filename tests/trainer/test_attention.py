"""Which kernel attention takes is what ran, not what was hoped for."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gangs import Workshop
from gpt_runs import start, write_config
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast_trainer.attention import attention_kernels
from holdfast_trainer.config import load
from holdfast_trainer.contract import Progress, Termination, read_lines
from holdfast_trainer.diagnose_command import main
from holdfast_trainer.model import build_model

SHORT = ("train.steps=2", "optim.warmup_steps=1", "validation.every=0")


def attend(**options: object) -> object:
    query = torch.randn(2, 2, 8, 16, requires_grad=True)
    return F.scaled_dot_product_attention(query, query, query, **options)  # type: ignore[arg-type]


def test_each_call_is_told_by_the_operator_that_ran_it() -> None:
    assert attention_kernels(lambda: attend(is_causal=True)) == "flash"
    mask = torch.zeros(8, 8, requires_grad=True)
    assert attention_kernels(lambda: attend(attn_mask=mask)) == "math", "the fused one has no such gradient"
    assert attention_kernels(lambda: attend(is_causal=True, dropout_p=0.1)) == "math"
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_kernels(lambda: attend(is_causal=True)) == "math"
    calls = [{"is_causal": True}, {"attn_mask": mask}, {"is_causal": True}]
    assert attention_kernels(lambda: [attend(**options) for options in calls]) == "flash, math"
    assert attention_kernels(lambda: torch.randn(4, 4).softmax(-1)) == "", "a softmax is no attention"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("dropout", "kernel"), [(0.0, "flash"), (0.1, "math")])
def test_both_families_take_the_fused_kernel_where_it_can_do_what_they_need(
    family: str, dropout: float, kernel: str, tmp_path: Path
) -> None:
    settings = load(write_config(tmp_path), [f"model.family={family}"], environ={})
    if family == "llama":
        settings = replace(settings, model=replace(settings.model, kv_heads=1))
    model = build_model(replace(settings.model, dropout=dropout))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    assert attention_kernels(lambda: model(tokens)) == kernel
    model.eval()
    assert attention_kernels(lambda: model(tokens)) == "flash", "nothing is dropped in validation"


def test_to_look_costs_no_compiler() -> None:
    """Its import takes longer than all else that comes before the first step."""
    script = (
        "import sys, torch\n"
        "from holdfast_trainer.attention import attention_kernels\n"
        "q = torch.zeros(1, 1, 4, 8, requires_grad=True)\n"
        "print(attention_kernels(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)))\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["flash", "False"]


def test_a_run_tells_it_once_in_log_ledger_and_progress(workshop: Workshop, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    gang = start(workshop, config, *SHORT, "model.dropout=0", name="fused", ranks=2)
    assert gang.wait(300) == [0, 0], gang.texts()
    assert gang.texts().count("fp32 on cpu, attention by flash") == 1
    (began,) = gang.history.events("attempt_start")
    assert began["attention"] == "flash"
    gang = start(workshop, config, *SHORT, name="plain")
    assert gang.wait(300) == [0], gang.texts()
    assert "attention by math" in gang.texts()
    (began,) = [line for line in read_lines(gang.history.run.ledger(1)) if line["event"] == "attempt_start"]
    assert began["attention"] == "math"
    word = Termination.from_json(
        (gang.history.run.path.parent / "plain-1" / "rank-0.termination").read_text()
    )
    assert word is not None
    assert isinstance(word.progress, Progress)
    assert word.progress.attention == "math"


def test_diagnose_names_the_setting_that_keeps_the_fused_kernel_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_config(tmp_path))
    words = ["--steps", "1", "--run-dir", str(tmp_path), "optim.learning_rate=1e-4"]
    assert main([file, *words]) == 0
    said = capsys.readouterr().out
    assert "attention   math" in said
    assert "warning: model.dropout: attention is computed by plain operators (math), with 16 x 16" in said
    assert "the fused kernel of a CPU has no dropout, set 0" in said
    assert main([file, *words, "model.dropout=0", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["attention"] == "flash"
    assert not [finding for finding in told["findings"] if "attention" in finding["message"]]


MINE = """
import torch
from torch import nn
from torch.nn import functional as F
from holdfast_trainer.tune.settings import Settings
from holdfast_trainer.tune.workload import Workload

class Masked(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.project = nn.Linear(16, 16)
        # A mask that learns needs a gradient, which no fused kernel of a CPU has.
        self.bias = nn.Parameter(torch.zeros(8, 8)) if masked else None

    def forward(self, x):
        x = self.project(x)[:, None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias, is_causal=self.bias is None)

def workload(make):
    data = [torch.full((8, 16), 1.0) for _ in range(8)]
    return Workload(make, data, lambda model, batch: model(batch).square().mean(), Settings(batch=2))

masked = lambda: workload(lambda: Masked(True))
causal = lambda: workload(lambda: Masked(False))
none = lambda: workload(lambda: nn.Linear(16, 16))
"""


@pytest.mark.parametrize(("make", "kernel"), [("masked", "math"), ("causal", "flash"), ("none", "")])
def test_diagnose_names_the_kernel_of_a_model_of_ones_own(
    make: str, kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a training step takes it: without gradients the one with a mask would have a fused kernel, too."""
    mine = tmp_path / f"mine_{make}.py"
    mine.write_text(MINE)
    assert main([f"{mine}:{make}", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("attention")]
    assert lines == ([f"attention   {kernel}"] if kernel else []), said
    assert main([f"{mine}:{make}", "--steps", "1", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["attention"] == kernel
