"""Training on what `datasets` streams: the same tokens as from its file, and an exact resume."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from gangs import KILL, Workshop
from pyarrow import parquet
from scripts import peers

from holdfast_trainer.prepare import Request, prepare

SCRIPT = Path(__file__).with_name("hf_stream_script.py")
LOOP = Path(__file__).with_name("stream_script.py")
CONTEXT = 512
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some MB of text in a file of JSON lines and in two of Parquet, and a tokenizer."""
    root = tmp_path_factory.mktemp("corpus")
    chance = random.Random(4)
    texts = [" ".join(str(chance.randrange(500)) for _ in range(chance.randrange(1200))) for _ in range(2000)]
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, part in (("a", texts[:1100]), ("b", texts[1100:])):
        parquet.write_table(pyarrow.table({"text": part}), root / f"{name}.parquet", row_group_size=90)
    (root / "few.txt").write_text("\n".join(texts[:200]))
    prepare(Request((root / "few.txt",), root / "out", vocab_size=512, validation_fraction=0))
    (root / "out" / "tokenizer.json").rename(root / "tokenizer.json")
    return root


def test_a_stream_of_datasets_has_the_tokens_of_its_file_from_any_place(corpus: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(peers.install()), str(corpus), str(tmp_path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["jsonl as the file"]
    assert found["parquet as the file"]
    assert found["saved as the file"]
    assert len(found["resumed"]) == 5
    for kind, resumed in found["resumed"].items():
        assert resumed["tried"] >= 4, kind
        assert resumed["units"] > 2, kind
        assert resumed["wrong"] == 0, kind
    assert found["shared out"] <= 2 * CONTEXT, "each rank's last window reaches into its next epoch"
    told = {
        "ranks": "the checkpoint's stream was read by 2 ranks, now there are 1: start as many, or prepare",
        "other shards": "not those of the checkpoint (names or sizes differ, or a dataset's shards, columns",
        "other first document": "name the same ones, not a dataset of 4 shards with text, or use a new run",
        "other text there": "is not what it was: the sources were changed, or do not give the same twice. ",
        "read in another way": "so its position means nothing: validation_fraction was 0.0, now 0.5; seed ",
        "shuffled": "the dataset has a shuffle buffer, and an interruption would lose what is in it: shuffle",
        "shuffled within": "the dataset has a shuffle buffer",
        "shuffled and tracked": "track(rows=...): the dataset has a shuffle buffer, and an interruption wo",
        "no column": "the dataset has no column 'body', it has 'text'; name the text's with text_field",
        "no text": "column 'text' of the dataset holds int, not text",
        "empty": "the dataset of TokenStream is empty",
        "no stream": "cannot resume a Dataset, which has no load_state_dict: give it paths, or a datasets.It",
    }
    assert found["refused"].keys() == told.keys()
    for case, words in told.items():
        assert words in found["refused"][case], case


def test_killed_equals_untouched(corpus: Path, workshop: Workshop, tmp_path: Path) -> None:
    env = {
        "HOLDFAST_STREAM": f"{corpus / 'a.parquet'}:{corpus / 'b.parquet'}",
        "HOLDFAST_TOKENIZER": str(corpus / "tokenizer.json"),
        "PEERS": str(peers.install()),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    untouched = workshop.finish("untouched", script=LOOP, env=env)
    killed = workshop.finish_interrupted((38, KILL), script=LOOP, env=env)
    starts = [line["resumed_step"] for line in killed.events("attempt_start")]
    assert 0 == starts[0] < starts[1] < 60, starts
    assert sorted(killed.losses()) == list(range(1, 61))
    assert killed.losses() == untouched.losses()
    assert killed.stop()["digest"] == untouched.stop()["digest"] != ""
