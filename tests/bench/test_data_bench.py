"""The benchmark of the data's way runs, lets subjects take turns, and says whom it left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bench.data import loaders, near_and_far
from bench.loading.encoders import CORPUS, TOKENIZER, prepare, write_corpus
from bench.report import ROOT
from processes import Processes
from tokenizers import Tokenizer


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ours_and_what_is_here_take_turns(processes: Processes, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.data", "--shape", "tiny", "--rounds", "1", "--batches", "5"]
    command += ["--steps", "1", "--far", "1000000", "--megabytes", "0.3", "--no-peers"]
    command += ["--out", str(tmp_path / "out"), "--place", str(tmp_path / "place")]
    process = processes.start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=1700)
    assert process.returncode == 0, out
    body = json.loads((tmp_path / "out" / "data.json").read_text())
    median = {(row["subject"], row["metric"]): row["median"] for row in body["rows"]}
    assert body["ratios"]["data_wait_share"] == median["holdfast", "data wait share"] < 1
    late, early = (median["holdfast", near_and_far(tokens)] for tokens in (10**6, 10**3))
    assert body["ratios"]["resume_1e6_vs_1e3"] == late / early
    assert median["torch DataLoader over memmap", "speed"] > 0
    assert median["holdfast prepare", "encoding"] > 0
    assert body["machine"]["left_out"]["datasets.map(num_proc)"] == "datasets is not installed"
    assert "torchdata StatefulDataLoader was left out: torchdata is not installed" in out
    assert "tokenize_vs_datasets_map" not in body["ratios"], "there is no ratio to nothing"
    assert list((tmp_path / "place").iterdir()) == [], "the data is removed"


def test_the_issues_ratio_has_the_issues_name() -> None:
    assert near_and_far(10**9) == "first batch at 1e9 tokens"
    assert [subject.workers for subject in loaders(8)] == [0, 0, 0, 8, 8, 8]


def test_the_command_makes_the_tokens_that_the_libraries_make(tmp_path: Path) -> None:
    """What is timed beside each other is the same work."""
    written = write_corpus(tmp_path, 0.2)
    prepare(tmp_path, tmp_path / "out", 1, "--validation-fraction", "0")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / TOKENIZER))
    texts = [json.loads(line)["text"] for line in (tmp_path / CORPUS).read_text().splitlines()]
    assert written == sum(len(text.encode()) for text in texts)
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id("<|endoftext|>")
    expected = [id for text in texts for id in (*tokenizer.encode(text).ids, end)]
    assert np.fromfile(tmp_path / "out" / "train-00000.bin", dtype="<u2").tolist() == expected
