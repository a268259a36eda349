"""The same weights in Hugging Face's transformers and in our models give the same logits, both ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import peers

SCRIPT = Path(__file__).with_name("hf_script.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_transformers_and_we_compute_the_same_from_the_same_weights(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(peers.install()), str(tmp_path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"gpt2", "llama"}
    for name, distance in found.items():
        assert distance["before"] > 1e-2, f"{name}: other weights give other logits"
        assert distance["taken"] < 1e-5, f"{name}: from theirs to ours"
        assert distance["given"] < 1e-5, f"{name}: from ours to theirs"
