"""The bad set-ups of the guide are bad in the way they say, and mending changes no result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.report import ROOT
from bench.tune import CAUSES
from bench.tuning import setups
from processes import Processes
from torch import Tensor, nn

from holdfast_trainer.diagnose_command import main
from holdfast_trainer.tune.census import census
from holdfast_trainer.tune.settings import Settings
from holdfast_trainer.tune.workload import Workload


def test_padding_a_ragged_batch_changes_no_loss() -> None:
    torch.manual_seed(0)
    slow, fast = setups.OneByOne(), setups.Together()
    fast.load_state_dict(slow.state_dict())
    samples = [setups.Sequences()[index] for index in range(6)]
    one, other = setups.ragged_loss(slow, samples), setups.padded_loss(fast, setups.padded(samples))
    torch.testing.assert_close(one, other)
    one.backward()
    other.backward()
    for left, right in zip(slow.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-6)


def test_a_loop_shows_in_the_operations_of_each_sample() -> None:
    samples = [setups.Sequences()[index] for index in range(4)]
    looping = sum(line.operations for line in census(lambda: setups.OneByOne()(samples)))
    together = sum(line.operations for line in census(lambda: setups.Together()(setups.padded(samples))))
    assert looping > 10 * together


def test_tokenising_beforehand_gives_the_same_samples() -> None:
    before, asked = setups.Tokenised(), setups.TokenisedWhenAsked()
    assert all(torch.equal(before[index], asked[index]) for index in (0, 7, 4095))
    assert all(hasattr(setups, name) for name in CAUSES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("loader", {"batch": "a pass holds one sample"}),
        ("ragged", {"python": "a loop in Python, busiest at setups.py:"}),
        (
            "precision",
            {"optimizer": "fused=True, one kernel for all parameters; do more work between two of its"},
        ),
    ],
)
def test_diagnose_names_what_was_made_bad(
    name: str, said: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command that the bench runs. What is named does not hang on how fast this machine is."""
    assert main([f"bench.tuning.setups:{name}", "--steps", "3", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    if name == "precision" and told["facts"]["fast_bf16"]:
        said = {**said, "precision": "this device multiplies bf16 faster"}
    messages = {one["cause"]: one["message"] for one in told["findings"]}
    assert told["findings"][0]["cause"] in CAUSES[name], messages
    for cause, words in said.items():
        assert words in messages[cause]


def tokenised_for_a_quick_model() -> Workload:
    """The loader's samples, where a step is as short as on a fast device."""

    def mean(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()

    fused = Settings(batch=1, threads=1, fused=True)
    return Workload(lambda: nn.Embedding(setups.VOCABULARY, 1), setups.TokenisedWhenAsked(), mean, fused)


def test_tokenising_while_a_step_waits_is_named_where_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{__file__}:tokenised_for_a_quick_model", "--steps", "200", "-o", "json"]) == 0
    messages = {one["cause"]: one["message"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert "of a step waits for data: " in messages["data"]
    assert "do what it does beforehand, once (tokenise with prepare" in messages["data"]
    assert "python" not in messages


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_estimate_is_held_against_a_real_run(processes: Processes, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.tune", "--only", "estimate", "--rounds", "1", "--run-steps", "5"]
    command += ["--out", str(tmp_path / "out"), "--place", str(tmp_path / "place")]
    process = processes.start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=1700)
    assert process.returncode == 0, out
    body = json.loads((tmp_path / "out" / "tune.json").read_text())
    median = {row["metric"]: row["median"] for row in body["rows"]}
    assert median["taken"] > 0
    assert body["ratios"]["estimate_error"] == abs(median["estimated"] - median["taken"]) / median["taken"]
