"""Training on text that nobody prepared: the position is in the checkpoint, no token is lost or doubled."""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
from gangs import KILL, NOTICE, Workshop
from pyarrow import parquet
from waiting import Deadline

from holdfast_trainer import token_stream
from holdfast_trainer.alike import announced
from holdfast_trainer.prepare import Request, prepare
from holdfast_trainer.token_index import DataError
from holdfast_trainer.token_stream import TokenStream

SCRIPT = Path(__file__).parent / "stream_script.py"
CONTEXT = 512


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some MB of text, packed and in a table with many row groups; prepared, too, for its tokens."""
    root = tmp_path_factory.mktemp("corpus")
    chance = random.Random(4)
    texts = [" ".join(str(chance.randrange(500)) for _ in range(chance.randrange(1200))) for _ in range(2600)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[:1300])
    (root / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode(), compresslevel=1))
    parquet.write_table(pyarrow.table({"text": texts[1300:]}), root / "b.parquet", row_group_size=90)
    request = Request((root,), root / "out", vocab_size=512, validation_fraction=0, shard_tokens=1 << 30)
    assert prepare(request).source["documents"]["train"] > 2500
    return root


def stream(corpus: Path, rank: int = 0, world_size: int = 1, batch: int = 7) -> TokenStream:
    tokenizer = corpus / "out" / "tokenizer.json"
    sources = [corpus / "a.jsonl.gz", corpus / "b.parquet"]
    return TokenStream(sources, tokenizer, context=CONTEXT, batch=batch, rank=rank, world_size=world_size)


def prepared(corpus: Path) -> np.ndarray:
    return np.fromfile(corpus / "out" / "train-00000.bin", dtype="<u2")


def test_what_a_token_takes_is_known_beside_steps_that_wait_for_none(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit lasts for many steps: who does a few sees no wait, be it read ever so slowly."""
    beside = stream(corpus)
    first, second, third = (len(beside._next_chunk().tokens) for _ in range(3))
    assert beside.seconds_a_token() is not None, "and its thread has come to rest"
    read = stream(corpus)
    assert read.seconds_a_token() is None
    ticks = itertools.count().__next__  # a unit takes a second by this clock
    monkeypatch.setattr(token_stream, "time", SimpleNamespace(perf_counter=ticks))
    read.batch()
    assert read.seconds_a_token() == pytest.approx(1 / second), "the first also opened the source"
    while read.state_dict()["unit"] == 0:
        read.batch()
    assert read.seconds_a_token() == pytest.approx(2 / (second + third))
    assert first > 7 * CONTEXT


def test_it_has_the_tokens_that_prepare_makes_over_and_over(corpus: Path) -> None:
    expected = np.tile(prepared(corpus), 2)
    read = stream(corpus)
    for start in range(0, len(expected) - 7 * CONTEXT - 1, 7 * CONTEXT):
        tokens, targets = read.batch()
        assert tokens.shape == (7, CONTEXT)
        assert np.array_equal(tokens.flatten(), expected[start : start + 7 * CONTEXT])
        assert np.array_equal(targets.flatten(), expected[start + 1 : start + 1 + 7 * CONTEXT])
    assert read.state_dict()["epoch"] == 1


def test_paths_may_be_text_and_one_needs_no_list(corpus: Path) -> None:
    """Paths as text ended in a TypeError. A pattern alone was one for each of its letters, so that by its *
    all files were read."""
    expected = stream(corpus)
    tokenizer = str(corpus / "out" / "tokenizer.json")
    for sources, patterns in (
        ([str(corpus / "a.jsonl.gz"), str(corpus / "b.parquet")], "*.txt"),
        (str(corpus), ["a.jsonl.gz", "b.parquet"]),
        (corpus, "[ab].*"),
    ):
        read = TokenStream(sources, tokenizer, context=CONTEXT, batch=7, patterns=patterns)
        assert read.identity == expected.identity


@pytest.mark.parametrize("world_size", [1, 2])
def test_from_any_position_it_goes_on_with_the_next_token(corpus: Path, world_size: int) -> None:
    """Beyond an epoch, too; another process would do the same."""
    untouched = stream(corpus, world_size - 1, world_size)
    batches, states = [], []
    for _ in range(3 * len(prepared(corpus)) // world_size // (2 * 7 * CONTEXT)):
        states.append(json.loads(json.dumps(untouched.state_dict())))
        batches.append(untouched.batch())
    assert len({state["unit"] for state in states}) > 2
    for place in random.Random(1).sample(range(len(states) - 2), 12):
        resumed = stream(corpus, world_size - 1, world_size)
        resumed.load_state_dict(states[place])
        assert resumed.state_dict() == states[place]
        for tokens, targets in batches[place : place + 3]:
            again = resumed.batch()
            assert again[0].equal(tokens)
            assert again[1].equal(targets)


def test_ranks_share_all_of_it(corpus: Path) -> None:
    counted = np.zeros(512, dtype=int)
    for rank in range(2):
        read = stream(corpus, rank, 2, batch=1)
        while not read.state_dict()["epoch"]:
            counted += np.bincount(read.batch()[0].flatten(), minlength=512)
    # Each rank's last window reaches into its next epoch.
    assert abs(counted - np.bincount(prepared(corpus), minlength=512)).sum() <= 2 * CONTEXT


@pytest.mark.slow
def test_killed_and_noticed_equals_untouched(corpus: Path, workshop: Workshop) -> None:
    sources = f"{corpus / 'a.jsonl.gz'}:{corpus / 'b.parquet'}"
    env = {"HOLDFAST_STREAM": sources, "HOLDFAST_TOKENIZER": str(corpus / "out" / "tokenizer.json")}
    untouched = workshop.finish("untouched", ranks=2, script=SCRIPT, env=env)
    interrupted = workshop.finish_interrupted((17, KILL), (38, NOTICE), ranks=2, script=SCRIPT, env=env)
    starts = [line["resumed_step"] for line in interrupted.events("attempt_start")]
    assert 0 == starts[0] < starts[1] < starts[2] < 60, starts
    assert sorted(interrupted.losses()) == list(range(1, 61))
    assert interrupted.losses() == untouched.losses()
    assert interrupted.stop()["digest"] == untouched.stop()["digest"] != ""


def test_another_source_or_other_ranks_are_refused(corpus: Path, tmp_path: Path) -> None:
    state = stream(corpus, 0, 2).state_dict()
    with pytest.raises(DataError, match=r"was read by 2 ranks, now there are 1: start as many, or prepare"):
        stream(corpus).load_state_dict(state)
    (tmp_path / "other.txt").write_text("other text")
    other = TokenStream([tmp_path], corpus / "out" / "tokenizer.json", context=4, batch=1)
    with pytest.raises(DataError, match="the stream's sources are not those of the checkpoint"):
        other.load_state_dict(state)


def test_a_stream_that_is_read_in_another_way_is_refused(corpus: Path, tmp_path: Path) -> None:
    """At the same path and offset there would be other text."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes((corpus / "out" / "tokenizer.json").read_bytes())

    def made(**options: Any) -> TokenStream:
        return TokenStream([corpus / "a.jsonl.gz"], tokenizer, context=4, batch=1, **options)

    state = json.loads(json.dumps(made().state_dict()))
    made(seed=7).load_state_dict(state)  # without a validation split it decides nothing
    for options, told in (
        (
            {"split": "validation"},
            "split was 'train', now 'validation'. Give it the same split, or use a new",
        ),
        ({"text_field": "body"}, "text_field was 'text', now 'body'"),
        ({"validation_fraction": 0.1}, "validation_fraction was 0.0, now 0.1; seed was None, now 1337"),
    ):
        with pytest.raises(DataError, match=re.escape(told)):
            made(**options).load_state_dict(state)
    body = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(body, indent=3))
    with pytest.raises(DataError, match=r"its position means nothing: tokenizer was '\w+', now '\w+'\. Give"):
        made().load_state_dict(state)
    del state["read_as"]  # as versions before wrote it
    made().load_state_dict(state)


def test_other_text_at_the_place_of_the_checkpoint_is_refused(corpus: Path, tmp_path: Path) -> None:
    """Of the same names and sizes: all that a start can see without reading everything."""
    text = tmp_path / "a.txt"
    text.write_text("one two three " * 200_000)
    tokenizer = corpus / "out" / "tokenizer.json"

    def made() -> TokenStream:
        return TokenStream([tmp_path], tokenizer, context=512, batch=2)

    read = made()
    read.batch()
    state = read.state_dict()
    made().load_state_dict(state)
    text.write_text("one six three " * 200_000)
    other = made()
    other.load_state_dict(state)
    told = (
        r"the text at the checkpoint's position \({'epoch': 0, 'unit': 0}\) is not what it was: the sources"
    )
    with pytest.raises(DataError, match=told):
        other.batch()
    del state["unit_digest"]  # as versions before wrote it
    made().load_state_dict(state)


def test_what_is_no_stream_is_refused(corpus: Path) -> None:
    class Endless:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter([])

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def made(sources: Any) -> None:
        TokenStream(sources, corpus / "out" / "tokenizer.json", context=4, batch=1)

    with pytest.raises(DataError, match=r"datasets, 2\.20 or later .*: pip install 'holdfast\[datasets\]'"):
        made(Endless())
    with pytest.raises(DataError, match=r"reads one split, not train, test: take dict\[NAME\]"):
        made({"train": Endless(), "test": Endless()})
    with pytest.raises(DataError, match="cannot resume a generator, which has no load_state_dict: give it"):
        made(text for text in "ab")


def test_ranks_compare_what_they_share_out(corpus: Path) -> None:
    before = announced()
    stream(corpus, 0, 2)
    new = {name: value for name, value in announced().items() if name not in before}
    sources, way = (name.partition(" (")[0] for name in new)
    assert (sources, way) == ("the sources of TokenStream", "the way TokenStream reads")
    first, how = new.values()
    assert first.startswith("2 files (")
    assert how.endswith(", train, text, 0.0, None")
    stream(corpus)
    assert len(announced()) == len(before) + 2, "alone there is nobody to compare with"


def test_a_rank_without_text_is_told(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a short text")
    tokenizer = corpus / "out" / "tokenizer.json"
    for rank in range(2):  # what one rank alone said was lost among the errors of its peers
        with pytest.raises(
            DataError, match=r"hold no train text for rank 1 of 2: prepare them, or start fewer ranks"
        ):
            TokenStream([tmp_path], tokenizer, context=4, batch=1, rank=rank, world_size=2)
    with pytest.raises(ValueError, match="no stream for rank 2 of 2, 1 windows of 4 tokens"):
        TokenStream([tmp_path], tokenizer, context=4, batch=1, rank=2, world_size=2)


def test_the_next_unit_is_encoded_meanwhile_and_its_fault_waits_for_its_turn(
    corpus: Path, tmp_path: Path, deadline: Deadline
) -> None:
    (tmp_path / "a.txt").write_text("three words more " * 70_000)  # more than a unit
    later = tmp_path / "b.txt"
    later.write_text("and what comes after them")
    read = TokenStream([tmp_path], corpus / "out" / "tokenizer.json", context=512, batch=8)
    begin = read.state_dict()
    later.unlink()
    first = read.batch()[0]
    assert read.batch()[0].shape == first.shape, "what came before the fault is served"
    names = [thread.name for thread in threading.enumerate()]
    assert any(name.startswith("token-stream") for name in names), names

    def rest(of: TokenStream) -> None:
        while of.state_dict()["epoch"] == 0:
            of.batch()

    for _ in range(2):
        with pytest.raises(DataError, match=re.escape(str(later))):
            rest(read)
    read.load_state_dict(begin)
    assert read.batch()[0].equal(first), "it can be begun anew"
    del read

    def ended() -> bool:
        gc.collect()  # a fault knows where it came from, also one that comes of what is encoded just now
        return not any(thread.name.startswith("token-stream") for thread in threading.enumerate())

    deadline.wait_until(ended, "its thread to end with it")


class Thread:
    """One that comes to its work only when somebody waits for a later result of its own."""

    def __init__(self) -> None:
        self._ahead: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        class Slow(Future[Any]):
            def result(slow, timeout: float | None = None) -> Any:
                while not slow.done():
                    future, run = self._ahead.pop(0)
                    future.set_result(run())
                return super(Slow, slow).result()

        future = Slow()
        self._ahead.append((future, lambda: work(*given)))
        return future


def test_a_batch_that_is_looked_at_before_the_resume_costs_no_text(corpus: Path) -> None:
    """As to see its shape, or to compile: where the machine was busy, the unit that was to be encoded next
    was taken from the place that was resumed from, and trained on by nobody."""
    read = stream(corpus)
    begin = read.state_dict()
    expected = [read.batch()[0] for _ in range(3)]
    again = stream(corpus)
    again._thread.shutdown()
    again._thread = Thread()  # type: ignore[assignment]
    again.batch()
    again.load_state_dict(begin)
    assert all(again.batch()[0].equal(tokens) for tokens in expected)
