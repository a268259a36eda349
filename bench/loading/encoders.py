"""Text to tokens by one tokenizer, with all cores: Holdfast's whole command beside others' parts of the way.

`holdfast` is the command as a user types it, from its start to shards on disk. `datasets` is its `map` over
rows that are loaded already, to an Arrow file. The rest encodes texts that are in memory and drops the
result: what the libraries can do at most.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

Encode = Callable[[Path, int], float]
"""Seconds for the corpus of a folder, with so many processes or threads."""

CORPUS, TOKENIZER = "corpus.jsonl", "tokenizer.json"
WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How the trained tokenizer cuts text before it merges: GPT-2's pattern."""
AT_ONCE = 1000
"""Texts."""


def write_corpus(folder: Path, megabytes: float) -> int:
    """Python sources of this installation as JSON lines, each once; how many bytes of text."""
    written = 0
    with open(folder / CORPUS, "w", encoding="utf-8") as out:
        for path in _sources():
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            out.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
            if written >= megabytes * 1e6:
                break
    return written


def _sources() -> Iterator[Path]:
    roots = [Path(os.__file__).parent, *(Path(p) for p in sys.path if p.endswith("site-packages"))]
    for root in roots:
        yield from sorted(root.rglob("*.py"))


def prepare(folder: Path, out: Path, workers: int, *more: str) -> None:
    """Runs the command; raises CalledProcessError with what it said."""
    words = ["--source", str(folder / CORPUS), "--out", str(out), "--workers", str(workers), *more]
    command = [sys.executable, "-m", "holdfast_trainer", "prepare", *words]
    subprocess.run(command, check=True, capture_output=True, text=True)


def _holdfast(folder: Path, workers: int, *more: str) -> float:
    out = folder / "prepared"
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    prepare(folder, out, workers, "--tokenizer", str(folder / TOKENIZER), *more)
    return time.perf_counter() - began


def holdfast(folder: Path, workers: int) -> float:
    return _holdfast(folder, workers)


def holdfast_tokenizers(folder: Path, workers: int) -> float:
    """With the `tokenizers` library alone."""
    return _holdfast(folder, workers, "--encoder", "tokenizers")


@cache
def _texts(folder: Path) -> list[str]:
    with open(folder / CORPUS, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


@cache
def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    tokenizer.encode_special_tokens = True
    return tokenizer


@cache
def _rows(folder: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset(
        "json", data_files=str(folder / CORPUS), split="train", cache_dir=str(folder / "cache")
    )


def datasets_map(folder: Path, workers: int) -> float:
    """`map(num_proc)` in batches of its own choice."""
    rows, tokenizer = _rows(folder), _tokenizer(folder)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [encoding.ids for encoding in encodings]}

    written = folder / "cache" / "mapped.arrow"
    began = time.perf_counter()
    rows.map(
        encode,
        batched=True,
        num_proc=workers,
        remove_columns=["text"],
        load_from_cache_file=False,
        cache_file_name=str(written),
    )
    seconds = time.perf_counter() - began
    for part in written.parent.glob("mapped*"):
        part.unlink()
    return seconds


def _timed(folder: Path, encode: Callable[[list[str]], Any]) -> float:
    texts = iter(_texts(folder))
    began = time.perf_counter()
    while part := list(islice(texts, AT_ONCE)):
        encode(part)
    return time.perf_counter() - began


def tokenizers(folder: Path, workers: int) -> float:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    return _timed(folder, lambda texts: _tokenizer(folder).encode_batch_fast(texts, add_special_tokens=False))


@cache
def _tiktoken(folder: Path) -> Any:
    """The same vocabulary as ranks: merges in the order in which they were learned."""
    import tiktoken
    from tokenizers.pre_tokenizers import ByteLevel

    body = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    special = {token["content"] for token in body["added_tokens"]}
    letters = _byte_letters()
    if set(letters) != set(ByteLevel.alphabet()):
        raise ValueError("the alphabet of bytes is another one")
    ranks = {
        bytes(letters[letter] for letter in token): rank
        for token, rank in body["model"]["vocab"].items()
        if token not in special
    }
    return tiktoken.Encoding("bench", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [b for b in range(256) if re.match(r"[!-~¡-¬®-ÿ]", chr(b))]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(rest)}


def tiktoken(folder: Path, workers: int) -> float:
    return _timed(folder, lambda texts: _tiktoken(folder).encode_ordinary_batch(texts, num_threads=workers))


@cache
def _gigatoken(folder: Path) -> Any:
    from gigatoken import Tokenizer

    return Tokenizer(str(folder / TOKENIZER))


def gigatoken(folder: Path, workers: int) -> float:
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    return _timed(folder, lambda texts: _gigatoken(folder).encode_batch(texts, parallel=True))


def same_tokens(folder: Path, texts: int = 200) -> float:
    """The share of texts of which tiktoken makes the same tokens."""
    chosen = _texts(folder)[:texts]
    ours = [e.ids for e in _tokenizer(folder).encode_batch_fast(chosen, add_special_tokens=False)]
    theirs = _tiktoken(folder).encode_ordinary_batch(chosen)
    same: int = sum(one == other for one, other in zip(ours, theirs, strict=True))
    return same / len(chosen)


ENCODERS: dict[str, Encode] = {
    "holdfast": holdfast,
    "holdfast-tokenizers": holdfast_tokenizers,
    "datasets": datasets_map,
    "tokenizers": tokenizers,
    "tiktoken": tiktoken,
    "gigatoken": gigatoken,
}
