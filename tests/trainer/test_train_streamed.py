"""`data.stream`: the reference training on text that nobody prepared, by configuration alone."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import yaml
from gangs import KILL, NOTICE, Workshop
from gpt_runs import CONFIG, start
from pyarrow import parquet

from holdfast_trainer.config import Config, ConfigError, load
from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.diagnose_command import main as diagnose
from holdfast_trainer.prepare import Request, prepare
from holdfast_trainer.token_index import DataError
from holdfast_trainer.train_data import open_data
from holdfast_trainer.tune.command import main as tune

VOCABULARY = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some MB of words, a part packed, one in a table, one as it is; and a tokenizer that `prepare` made."""
    root = tmp_path_factory.mktemp("corpus")
    chance = random.Random(4)
    words = [str(chance.randrange(10_000)) for _ in range(60)]
    texts = [" ".join(chance.choices(words, k=chance.randrange(1, 900))) for _ in range(1800)]
    (root / "texts").mkdir()
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts[:800])
    (root / "texts" / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode(), compresslevel=1))
    parquet.write_table(pyarrow.table({"body": texts[800:]}), root / "b.parquet", row_group_size=100)
    (root / "texts" / "c.log").write_text(" ".join(texts[:20]))
    prepare(Request((root / "texts" / "c.log",), root / "out", vocab_size=VOCABULARY, validation_fraction=0))
    return root


Write = Callable[..., Path]


@pytest.fixture
def write(corpus: Path, tmp_path: Path) -> Write:
    def written(**changes: object) -> Path:
        stream = {
            "sources": [str(corpus / "texts"), str(corpus / "b.parquet")],
            "tokenizer": str(corpus / "out" / "tokenizer.json"),
            "patterns": ["*.jsonl.gz", "*.log"],
            "text_field": "body",
            "validation_fraction": 0.05,
        }
        body = {**CONFIG, "model": {**CONFIG["model"], "vocab_size": VOCABULARY}}
        body["data"] = {"stream": stream | changes}
        path = tmp_path / "gpt.yaml"
        path.write_text(yaml.safe_dump(body))
        return path

    return written


@pytest.mark.slow
def test_an_interrupted_run_on_a_stream_equals_an_untouched_one(workshop: Workshop, write: Write) -> None:
    config = write()
    twin = start(workshop, config, name="twin", ranks=2)
    assert twin.wait() == [0, 0], twin.texts()
    assert set(twin.history.validations()) == {9, 18, 27, 36, 40}
    for at, signal in ((10, KILL), (22, NOTICE)):
        gang = start(workshop, config, ranks=2)
        gang.wait_for_step(at)
        gang.wait_for_checkpoint()
        gang.signal(signal)
        gang.wait()
    last = start(workshop, config, ranks=2)
    assert last.wait() == [0, 0], last.texts()
    assert last.history.losses() == twin.history.losses()
    assert last.history.validations() == twin.history.validations()
    assert last.history.stop()["digest"] == twin.history.stop()["digest"] != ""
    losses = [float.fromhex(bits) for _, bits in sorted(last.history.losses().items())]
    assert losses[-1] < losses[0] * 0.9, "it learned something"
    assert "epoch" not in last.texts(), "how long one is, is not known"


def test_validation_reads_what_training_does_not_and_always_the_same(write: Write) -> None:
    config = load(write(), environ={})
    training, held_out = open_data(config, 0, 1)
    assert held_out is not None
    shape = {"rank": 0, "world_size": 1, "global_batch": config.train.global_batch}
    first = [held_out.batch(seed=0, step=step, **shape) for step in range(3)]
    for _ in range(4):
        training.batch(seed=1, step=0, **shape)
    again = [held_out.batch(seed=0, step=step, **shape) for step in range(3)]
    for (tokens, targets), (same, following) in zip(first, again, strict=True):
        assert tokens.equal(same)
        assert targets.equal(following)
    assert not first[0][0].equal(first[1][0])
    assert training.tracked
    assert "12 windows of 16 tokens of the stream, before epoch 0, unit 0, token 768" in training.describe(
        1, 0, 12
    )


def test_another_source_under_the_same_run_is_refused_and_said(
    workshop: Workshop, write: Write, corpus: Path
) -> None:
    short = ("train.steps=6", "optim.warmup_steps=2", "validation.every=0")
    assert start(workshop, write(), *short).wait() == [0]
    for changes, told in (
        ({"sources": [str(corpus / "b.parquet")]}, "the stream's sources are not those of the checkpoint"),
        ({"validation_fraction": 0.1}, "validation_fraction was 0.05, now 0.1"),
    ):
        gang = start(workshop, write(**changes), *short)
        assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
        assert told in gang.termination().error


def test_as_many_ranks_are_needed_as_before(workshop: Workshop, write: Write) -> None:
    short = ("train.steps=6", "optim.warmup_steps=2", "validation.every=0")
    assert start(workshop, write(), *short, ranks=2).wait() == [0, 0]
    gang = start(workshop, write(), *short)
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    assert "the checkpoint's stream was read by 2 ranks, now there are 1: start as many, or prepare" in (
        gang.termination().error
    )


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({}, ["data.path=shards"], "data.stream: there is data.path, too: name one of them"),
        (
            {},
            ["data.verify=true"],
            "data.verify: prepared shards have checksums, data.stream has none; leave it",
        ),
        (
            {},
            ["data.stream=null"],
            "data.path: required, but missing (expected a path, of what `prepare` wrote)",
        ),
        ({"sources": []}, [], "data.stream.sources: an empty list; name files or directories with text"),
        (
            {"sources": "texts"},
            [],
            "data.stream.sources: expected a list, such as [a, b], found the text 'texts'",
        ),
        ({"source": "x"}, [], "data.stream.source: unknown key; did you mean 'sources'?"),
        (
            {},
            ["data.stream.validation_fraction=0"],
            "validation.every: data.stream keeps no text for it; set data.",
        ),
        ({}, ["data.stream.validation_fraction=1"], "data.stream.validation_fraction: must be below 1"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(
    write: Write, changes: dict[str, object], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(**changes), overrides, environ={})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"sources": ["/nowhere"]}, [], "source /nowhere does not exist"),
        ({"patterns": ["*.txt"]}, [], "matches *.txt"),
        ({"tokenizer": "/nowhere.json"}, [], "tokenizer /nowhere.json does not exist"),
        (
            {},
            ["model.vocab_size=64"],
            "has a vocabulary of 300 tokens, the model of 64: set model.vocab_size to",
        ),
        ({"text_field": "text"}, [], "has no column 'text'"),
        (
            {"validation_fraction": 1e-9},
            [],
            "the sources hold no validation text for rank 0 of 1: take more documents",
        ),
    ],
)
def test_what_cannot_be_read_is_said_before_the_ranks_meet(
    write: Write, changes: dict[str, object], overrides: list[str], message: str
) -> None:
    config: Config = load(write(**changes), overrides, environ={})
    with pytest.raises(DataError) as caught:
        open_data(config, 0, 1)
    assert message in str(caught.value)


def test_diagnose_measures_a_stream_and_tune_says_what_it_needs(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write())
    assert diagnose([file, "--steps", "1", "--run-dir", str(tmp_path), "optim.learning_rate=1e-4"]) == 0
    said = capsys.readouterr().out
    assert "data        streamed and tokenised meanwhile; how much there is, is not known" in said
    assert tune([file, "--out", str(tmp_path / "tuned")]) == EXIT_CONFIG_ERROR
    assert "error: data.stream: a stream has one batch after the other" in capsys.readouterr().err
