"""bench/activity: where there is nothing to compare, it says so and writes nothing."""

from __future__ import annotations

import sys

import pytest
from bench import activity


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "PyTorch finds no GPU here: this compares a GPU's own counts with work that it did"),
        (["--rounds", "0"], "--rounds 0 --seconds 6: at least 1 and 3 are needed"),
        (["--seconds", "1"], "--rounds 3 --seconds 1: at least 1 and 3 are needed"),
    ],
)
def test_what_it_cannot_do_is_told(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.activity", *words])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        activity.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
