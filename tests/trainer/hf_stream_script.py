"""With `datasets` beside: a TokenStream that reads its streams, against the files that these were made of."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(sys.argv[1])

import datasets
import torch
from datasets import Dataset, load_dataset, load_from_disk

from holdfast_trainer.checkpoint.errors import UnsupportedState
from holdfast_trainer.prepare.corpus import PIECE_BYTES
from holdfast_trainer.token_index import DataError
from holdfast_trainer.token_stream import TokenStream
from holdfast_trainer.training_state import TrainingState

corpus, scratch = Path(sys.argv[2]), Path(sys.argv[3])
datasets.disable_progress_bars()
BATCH, CONTEXT = 7, 512


def stream(source: Any, rank: int = 0, world_size: int = 1, **options: Any) -> TokenStream:
    sizes = {"context": CONTEXT, "batch": BATCH, **options}
    return TokenStream(source, corpus / "tokenizer.json", rank=rank, world_size=world_size, **sizes)


def streamed(kind: str, files: list[Path]) -> Any:
    names = [str(file) for file in files]
    return load_dataset(
        kind, data_files=names, split="train", streaming=True, cache_dir=str(scratch / "cache")
    )


def saved() -> Any:
    return load_from_disk(str(scratch / "saved")).to_iterable_dataset(num_shards=4)


def batches_of(read: TokenStream, epochs: int = 2) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    batches, states = [], []
    while read.state_dict()["epoch"] < epochs:
        states.append(json.loads(json.dumps(read.state_dict())))
        batches.append(torch.stack(read.batch()))
    return batches, states


def resumes(made: Callable[[], TokenStream]) -> dict[str, int]:
    """From places in and between units, shards and epochs. How many were tried, and how many were wrong."""
    batches, states = batches_of(made())
    chance, wrong = random.Random(1), 0
    places = sorted({0, *chance.sample(range(len(states) - 2), 4)})
    for place in places:
        again = made()
        again.load_state_dict(states[place])
        same = again.state_dict() == states[place]
        for batch in batches[place : place + 3]:
            same = same and torch.equal(torch.stack(again.batch()), batch)
        wrong += not same
    units = {json.dumps([state["epoch"], state["dataset"]]) for state in states}
    return {"tried": len(places), "wrong": wrong, "units": len(units)}


def refusal(of: Callable[[], object]) -> str:
    try:
        of()
    except (DataError, UnsupportedState) as error:
        return str(error)
    return "nothing was refused"


texts = [json.loads(line)["text"] for line in (corpus / "texts.jsonl").read_text().splitlines()]
assert sum(map(len, texts)) > 3 * PIECE_BYTES
Dataset.from_dict({"text": texts}).save_to_disk(str(scratch / "saved"), num_shards=2)
parquet = []
for number in range(4):
    part = texts[number * len(texts) // 4 : (number + 1) * len(texts) // 4]
    parquet.append(scratch / f"{number}.parquet")
    Dataset.from_dict({"text": part}).to_parquet(str(parquet[-1]), batch_size=100)

found: dict[str, Any] = {}
plain = batches_of(stream([corpus / "texts.jsonl"]))[0]
for name, source in {
    "jsonl": streamed("json", [corpus / "texts.jsonl"]),
    "parquet": streamed("parquet", parquet),
    "saved": saved(),
}.items():
    ours = batches_of(stream(source))[0]
    found[f"{name} as the file"] = len(ours) == len(plain) and all(map(torch.equal, ours, plain))
found["resumed"] = {
    "jsonl": resumes(lambda: stream(streamed("json", [corpus / "texts.jsonl"]))),
    "parquet": resumes(lambda: stream(streamed("parquet", parquet))),
    "parquet, rank 1 of 2, shards of its own": resumes(lambda: stream(streamed("parquet", parquet), 1, 2)),
    "saved, rank 2 of 3, every third example": resumes(lambda: stream(saved(), 2, 3)),
    "mapped": resumes(lambda: stream(saved().map(lambda row: {"text": row["text"].upper()}))),
}
shared = []
for rank in range(2):
    read = stream(streamed("parquet", parquet), rank, 2, batch=1)
    while read.state_dict()["epoch"] == 0:
        shared.append(torch.bincount(read.batch()[0].flatten(), minlength=512))
whole = stream([corpus / "texts.jsonl"], batch=1)
counted = []
while whole.state_dict()["epoch"] == 0:
    counted.append(torch.bincount(whole.batch()[0].flatten(), minlength=512))
found["shared out"] = int((sum(shared) - sum(counted)).abs().sum())

state = stream(streamed("parquet", parquet), 0, 2).state_dict()
read = stream(streamed("parquet", parquet))
for _ in range(20):
    read.batch()
late = read.state_dict()
late_text = {**late, "unit_digest": "another"}


def goes_on(place: dict[str, Any], source: Any, **options: Any) -> Callable[[], object]:
    def go() -> None:
        resumed = stream(source, **options)
        resumed.load_state_dict(place)
        resumed.batch()

    return go


found["refused"] = {
    "ranks": refusal(goes_on(state, streamed("parquet", parquet))),
    "other shards": refusal(goes_on(late, streamed("parquet", parquet[:3]))),
    "other first document": refusal(goes_on(late, streamed("parquet", [*parquet[1:], parquet[0]]))),
    "other text there": refusal(goes_on(late_text, streamed("parquet", parquet))),
    "read in another way": refusal(goes_on(late, streamed("parquet", parquet), validation_fraction=0.5)),
    "shuffled": refusal(lambda: stream(streamed("parquet", parquet).shuffle(seed=1, buffer_size=100))),
    "shuffled within": refusal(lambda: stream(saved().shuffle(seed=1, buffer_size=9).map(dict))),
    "shuffled and tracked": refusal(
        lambda: TrainingState({"rows": saved().shuffle(seed=1, buffer_size=9).batch(4)}, rank=0)
    ),
    "no column": refusal(lambda: stream(streamed("parquet", parquet), text_field="body")),
    "no text": refusal(lambda: stream(Dataset.from_dict({"text": [3]}).to_iterable_dataset())),
    "empty": refusal(lambda: stream(saved().filter(lambda row: False))),
    "no stream": refusal(lambda: stream(load_from_disk(str(scratch / "saved")))),
}
print(json.dumps(found))
