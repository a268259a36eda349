"""A user looks into a run directory: what is there, is it whole, the weights out, where do two runs part."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from disks import fill
from gangs import RankServer, Workshop
from processes import Processes
from safetensors.torch import load_file
from saving import make_saver
from torch import nn

from holdfast_trainer.__main__ import main
from holdfast_trainer.checkpoint import manifest as manifests
from holdfast_trainer.checkpoint_command import age_text
from holdfast_trainer.contract import MANIFEST, RunDir
from holdfast_trainer.sizes import size_text


@pytest.fixture(scope="module")
def runs(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`ddp` (two ranks, batch norm) and `longer` (the same, a step more); checkpoints of 5 and 10."""
    path = tmp_path_factory.mktemp("runs")
    workshop = Workshop(rank_server, path)
    try:
        workshop.finish("ddp", ranks=2, steps=10, norm=True)
        workshop.finish("twin", ranks=2, steps=10, norm=True)
        workshop.finish("alone", ranks=1, steps=10, norm=True)
        yield path
    finally:
        workshop.end()


@pytest.fixture
def ddp(runs: Path, tmp_path: Path) -> RunDir:
    """A copy that a test may damage."""
    shutil.copytree(runs / "ddp", tmp_path / "ddp")
    return RunDir(tmp_path / "ddp")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.write_bytes(raw)


def parts_of(run: RunDir, step: int) -> list[Path]:
    return sorted(run.checkpoint(step).glob("*.safetensors"))


# -------------------------------------------------------------------------- ls


def test_ls_shows_what_there_is(ddp: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (ddp.checkpoints / ".step-00000015.attempt-1.save-3").mkdir()
    assert main(["checkpoint", "ls", str(ddp.path)]) == 0
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["STEP", "ATTEMPT", "RANKS", "SIZE", "AGE", "DIGEST", "STATE"]
    assert lines[0][:4] == ["15", "1", "-", "-"]
    assert lines[0][-3:] == ["unfinished:", "never", "committed"]
    assert [(line[0], line[1], line[2], line[-1]) for line in lines[1:]] == [
        ("10", "1", "2", "good"),
        ("5", "1", "2", "good"),
    ]

    assert main(["checkpoint", "ls", str(ddp.path), "-o", "json"]) == 0
    newest = json.loads(capsys.readouterr().out)[1]
    assert newest["step"] == 10
    assert newest["bytes"] == sum(path.stat().st_size for path in parts_of(ddp, 10))
    assert len(newest["digest"]) == 64
    assert newest["age_seconds"] >= 0


def test_ls_tells_damage_that_shows_without_reading(ddp: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    parts_of(ddp, 10)[1].unlink()
    (ddp.checkpoint(5) / "manifest.json").write_text("{}")
    assert main(["checkpoint", "ls", str(ddp.path)]) == 1
    out = capsys.readouterr().out
    assert f"damaged: {parts_of(ddp, 5)[1].name}: No such file" in out
    assert "damaged: manifest.json: not a manifest" in out


# ---------------------------------------------------------------------- verify


def test_verify_reads_everything_and_names_the_bad_file(
    ddp: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "verify", str(ddp.path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["step-00000010: good", "step-00000005: good"]

    damaged = parts_of(ddp, 10)[1]
    flip(damaged)
    assert main(["checkpoint", "verify", str(ddp.path)]) == 1
    told = capsys.readouterr()
    assert f"step-00000010: BAD: {damaged.name}: checksum" in told.out
    assert "step-00000005: good" in told.out
    assert "1 of 2 checkpoints are bad; a resume passes over what is damaged" in told.err
    assert main(["checkpoint", "verify", f"{ddp.path}@5"]) == 0

    flip(parts_of(ddp, 5)[0])
    assert main(["checkpoint", "verify", str(ddp.path)]) == 1
    assert (
        "2 of 2 checkpoints are bad; a run with none that is good refuses to begin" in capsys.readouterr().err
    )


def test_a_checkpoint_that_the_job_removes_meanwhile_is_not_called_bad(
    ddp: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention lets step 5 go while step 10 is read, which takes minutes where it is large."""

    class Told(io.StringIO):
        def write(self, text: str) -> int:
            if "step-00000010" in text:
                shutil.rmtree(ddp.checkpoint(5))
            return super().write(text)

    told = Told()
    monkeypatch.setattr(sys, "stdout", told)
    assert main(["checkpoint", "verify", str(ddp.path)]) == 0
    assert told.getvalue() == "step-00000010: good\nstep-00000005: removed by the run meanwhile\n"


def test_a_checkpoint_of_another_version_is_not_called_bad(
    ddp: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who rolled back was told that a resume would pass over it: it ends with it, and keeps it."""
    written = ddp.checkpoint(10) / MANIFEST
    body = json.loads(written.read_text())
    del body["checksum"]
    body["version"] = 6
    written.write_text(json.dumps({**body, "checksum": manifests._checksum(body)}, indent=1))
    why = "manifest.json: version 6 is none of 3 to 5: written by another Holdfast"
    assert main(["checkpoint", "ls", str(ddp.path)]) == 1
    assert capsys.readouterr().out.splitlines()[1].endswith(f"  other version: {why}")
    assert main(["checkpoint", "verify", str(ddp.path)]) == 1
    told = capsys.readouterr()
    assert told.out.splitlines() == [f"step-00000010: not verified: {why}", "step-00000005: good"]
    assert told.err == (
        "1 of 2 checkpoints are of a version that is not read here; a resume that comes to one ends with "
        "that, and does not go on from the one before\n"
    )
    assert main(["checkpoint", "export", str(ddp.path), "--out", str(tmp_path / "out.safetensors")]) == 2
    assert capsys.readouterr().err == f"error: {written.parent} cannot be read here: {why}\n"


# ---------------------------------------------------------------------- export


def network() -> nn.Module:
    """The model of the loop that wrote the runs."""
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(32, 4))


def test_the_weights_of_a_ddp_run_load_into_the_bare_model(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, packed = tmp_path / "weights.pt", tmp_path / "weights.safetensors"
    packed.symlink_to(tmp_path / "elsewhere")
    assert main(["checkpoint", "export", str(runs / "ddp"), "--out", str(packed)]) == 0
    assert "the weights of 'model', step 10 of 2 ranks" in capsys.readouterr().out
    assert main(["checkpoint", "export", str(runs / "ddp"), "--out", str(plain), "--format", "torch"]) == 0
    tensors, same = load_file(packed), torch.load(plain, weights_only=True)
    versions = {path: of for path, of in network().state_dict()._metadata.items() if path in same._metadata}
    assert same._metadata == versions, "which modules such as those of torchvision's MNASNet ask for"
    assert versions["1"] == {"version": 2}
    network().load_state_dict(tensors)
    network().load_state_dict(same)
    assert all(torch.equal(tensors[name], same[name]) for name in same)
    assert packed.is_symlink(), "the file was replaced, not the link to it, such as /dev/stdout"
    assert "step 10" in capsys.readouterr().out


def test_weights_that_are_taken_out_are_for_all_whom_the_umask_lets_read(
    runs: Path, tmp_path: Path, processes: Processes
) -> None:
    """As safetensors they were their owner's alone, whatever the umask."""
    command = [sys.executable, "-m", "holdfast_trainer", "checkpoint", "export", str(runs / "ddp"), "--out"]
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        out = tmp_path / f"{mask:o}.safetensors"
        assert processes.start([*command, out], umask=mask).wait(60) == 0
        assert stat.S_IMODE(out.stat().st_mode) == mode


def test_all_of_a_checkpoint_can_be_taken_out(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "state.pt"
    target = f"{runs / 'ddp'}@5"
    assert main(["checkpoint", "export", target, "--out", str(out), "--format", "torch", "--all"]) == 0
    state = torch.load(out, weights_only=True)
    assert set(state) == {"model", "optimizer", "scheduler"}
    assert state["scheduler"]["last_epoch"] == 5
    assert main(["checkpoint", "export", target, "--out", str(tmp_path / "s"), "--all"]) == 0
    assert torch.equal(load_file(tmp_path / "s")["model.0.weight"], state["model"]["0.weight"])
    assert any(name.startswith("optimizer.state") for name in load_file(tmp_path / "s"))


def test_a_model_whose_modules_give_more_than_tensors_can_be_taken_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said to be no model; and what NumPy made torch.load(weights_only=True) refused."""
    model = {"0.weight": torch.ones(2), "0._extra_state": {"mean": np.float64(0.5), "seen": np.arange(2)}}
    run = RunDir(tmp_path / "run")
    saver = make_saver(run)
    saver.save(7, {"parts": {"model": model, "losses": {"best": np.float32(0.5)}}}, {})
    saver.wait()

    def export(name: str, *options: str) -> str:
        assert main(["checkpoint", "export", str(run.path), "--out", str(tmp_path / name), *options]) == 0
        return capsys.readouterr().out

    assert "the weights of 'model' without 0._extra_state, which --format torch has, " in export("packed")
    assert load_file(tmp_path / "packed").keys() == {"0.weight"}
    export("plain", "--format", "torch")
    taken = torch.load(tmp_path / "plain", weights_only=True)
    assert (taken["0._extra_state"]["mean"], taken["0._extra_state"]["seen"].tolist()) == (0.5, [0, 1])
    export("all", "--format", "torch", "--all")
    assert torch.load(tmp_path / "all", weights_only=True)["losses"] == {"best": 0.5}


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_an_export_that_finds_no_room_says_so_and_leaves_nothing(
    ddp: RunDir, small_disk: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(small_disk / "filler")
    words = ["checkpoint", "export", str(ddp.path), "--out", str(small_disk / "out"), "--format", form]
    assert main(words) == 2
    assert "out cannot be written: " in (told := capsys.readouterr().err)
    assert "No space left on device" in told
    assert [path.name for path in small_disk.iterdir() if path.is_file()] == ["filler"]


def test_an_export_that_is_left_without_room_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what it could not end torch said that it was not where it had expected to be."""
    run, out = RunDir(tmp_path / "run"), str(tmp_path / "out")
    saver = make_saver(run)
    saver.save(7, {"parts": {"model": {f"{number}.weight": torch.ones(128, 32) for number in range(3)}}}, {})
    saver.wait()
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in range(2048, 40960, 4096):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            assert main(["checkpoint", "export", str(run.path), "--out", out, "--format", "torch"]) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
        assert capsys.readouterr().err == f"error: {out} cannot be written: File too large\n"


def test_what_cannot_be_exported_is_said(
    ddp: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "weights"

    def error(*arguments: str, to: Path = out) -> str:
        assert main(["checkpoint", "export", *arguments, "--out", str(to)]) == 2
        return capsys.readouterr().err

    where = str(ddp.path)
    assert "--part ema: no model of that name; models are model" in error(where, "--part", "ema")
    assert "--all and --part exclude one another" in error(where, "--part", "model", "--all")
    assert f"{tmp_path / 'no' / 'w'} cannot be written: " in error(where, to=tmp_path / "no" / "w")
    assert f"--out {tmp_path} is a directory; name a file" in error(where, to=tmp_path)
    assert "--out . is a directory; name a file" in error(where, to=Path())
    os.mkfifo(tmp_path / "device")
    told = error(where, to=tmp_path / "device")
    assert f"--out {tmp_path / 'device'} is there and is no file, which it would replace" in told
    assert (tmp_path / "device").is_fifo(), "as root it would have replaced /dev/null for the whole machine"
    flip(parts_of(ddp, 10)[0])
    assert "is bad: rank-0" in error(where)
    assert "Name another step" in error(where)
    assert not out.exists()


# ------------------------------------------------------------------------ diff


def test_twins_are_identical(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", str(runs / "ddp"), str(runs / "twin")]) == 0
    assert "identical: every value, bit for bit" in capsys.readouterr().out


def test_diff_says_where_two_states_part(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [f"{runs / 'ddp'}@5", f"{runs / 'ddp'}@10"]
    assert main(["checkpoint", "diff", *both, "--limit", "3"]) == 1
    out = capsys.readouterr().out
    assert "\nshared.parts.model.0.bias: 32 of 32 elements differ, at most 0.0" in out
    assert "(--limit " in out
    with pytest.raises(SystemExit):
        main(["checkpoint", "diff", *both, "--limit", "-1"])
    assert "--limit: -1 is below 0" in capsys.readouterr().err
    assert main(["checkpoint", "diff", *both, "-o", "json"]) == 1
    body = json.loads(capsys.readouterr().out)
    found = {d["name"]: d for d in body["differences"]}
    weight = found["shared.parts.model.0.weight"]
    left, right = (c["path"] for c in body["checkpoints"])
    assert (left[-2:], right[-2:]) == ("05", "10")
    assert 0 < weight["max_abs"] < 1
    assert weight["what"].endswith("of 512 elements differ")
    assert found["shared.parts.scheduler.last_epoch"]["what"] == "5 / 10"


def test_other_numbers_of_ranks_can_be_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", str(runs / "ddp"), str(runs / "alone"), "-o", "json"]) == 1
    found = {d["name"]: d["what"] for d in json.loads(capsys.readouterr().out)["differences"]}
    assert "elements differ" in found["shared.parts.model.0.weight"]
    assert found["rank 1: own.rng.torch"] == "only in the first"


def test_diff_does_not_call_damage_a_difference(
    runs: Path, ddp: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit was shown as one element that differs, beside two equal digests."""
    flip(parts_of(ddp, 10)[0])
    assert main(["checkpoint", "diff", str(runs / "twin"), str(ddp.path)]) == 2
    said = capsys.readouterr()
    assert f"{ddp.checkpoint(10)} is bad: rank-0.safetensors: checksum " in said.err
    assert said.out == ""

    replaced = parts_of(ddp, 5)[1]
    replaced.unlink()
    replaced.mkdir()
    assert main(["checkpoint", "diff", str(runs / "twin"), f"{ddp.path}@5"]) == 2
    assert f"{ddp.checkpoint(5)} is bad: {replaced.name}" in capsys.readouterr().err


# ------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "{tmp}/nowhere"], "nowhere is no directory; name a run directory"),
        (["ls", "{tmp}"], "has no checkpoints/ in it, so it is no run directory that saved"),
        (["ls", "{ddp}@7"], "has no checkpoint of step 7; there are 10, 5"),
        (["ls", "{ddp}@7", "-o", "json"], "has no checkpoint of step 7; there are 10, 5"),
        (["verify", "{ddp}@7"], "has no checkpoint of step 7; there are 10, 5"),
        (["verify", "{ddp}@new"], "after @ comes a step, such as"),
        (["export", "{empty}", "--out", "x"], "holds no checkpoint"),
        (["diff", "{ddp}", "{ddp}@11"], "has no checkpoint of step 11"),
    ],
)
def test_a_wrong_question_is_answered_with_what_is_right(
    runs: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    places = {"tmp": tmp_path, "ddp": runs / "ddp", "empty": tmp_path / "empty"}
    assert main(["checkpoint", *(word.format(**places) for word in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_run_has_nothing_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"no checkpoints in {tmp_path / 'checkpoints'}"] * 2


def test_a_file_that_another_program_wrote_is_refused(
    ddp: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, parts_of(ddp, 10)[0])
    assert main(["checkpoint", "diff", str(ddp.path), f"{ddp.path}@5"]) == 2
    assert "is bad: rank-0.safetensors has 72 bytes, its manifest says " in capsys.readouterr().err


def test_help_teaches_and_needs_no_torch(processes: Processes) -> None:
    code = (
        "import sys; from holdfast_trainer.__main__ import main\n"
        "try: main(['checkpoint', '--help'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = processes.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
    out, _ = done.communicate(timeout=300)
    assert done.returncode == 0
    assert "checkpoint diff runs/a runs/twin    # do two runs end with the same bits?" in out
    assert "Exit status: 0 all is well, 1 something is bad or different" in out


def test_sizes_and_ages_are_short() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 1_493_000_000, 5 * 10**15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.49 GB",
        "5e+03 TB",
    ]
    assert [age_text(s) for s in (0, 59.9, 190, 18120, 187200)] == ["0s", "59s", "3m10s", "5h02m", "2d4h"]
