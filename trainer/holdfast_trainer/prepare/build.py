"""One preparation from start to end, or from where the last one was stopped."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from ..contract import exists
from ..sizes import size_text
from ..token_index import FORMAT, INDEX_FILE, ITEM_SIZE, SPLITS, TokenIndex, read_index
from .arguments import arguments_of, check, check_same, source_of
from .corpus import PrepareError, Request, SourceFile, units
from .encode import EncodedUnit, EncoderSettings
from .encoder import Engine, choose
from .listing import list_files
from .parallel import encode_units
from .progress import reporting, say
from .reading import Reader
from .store import STATE_FILE, ShardStore, State, Tally, read_state, storage_error, write_state, write_text
from .tokenizer import (
    end_of_text,
    parse_tokenizer,
    read_tokenizer,
    sample,
    train_tokenizer,
    training_pieces,
    vocabulary,
)

TOKENIZER_FILE = "tokenizer.json"
SAVE_SECONDS = 2.0
"""Between two records of the place reached: a killed preparation does at most this much again."""

TRIED_CHARACTERS = 1 << 18
"""Of the text, encoded by both libraries before the start: a tenth of a second."""


def prepare(request: Request) -> TokenIndex:
    """Prepare `request.sources` into `request.out` and return its index.

    Goes on where an earlier call with the same text and arguments was stopped, and returns at once
    where it had finished. Raises PrepareError; what was done until then is kept.
    """
    started = time.monotonic()
    check(request)
    files = list_files(request)
    arguments, source = arguments_of(request), source_of(files)
    if not source["bytes"]:
        raise PrepareError(f"the {len(files)} files of the sources are all empty")
    with _exclusive(request.out):
        if exists(request.out / INDEX_FILE):
            index = read_index(request.out)
            check_same(request.out, index.arguments, index.source, arguments, source)
            ShardStore(request.out, index.dtype, request.shard_tokens, _finished_state(index))
            (request.out / STATE_FILE).unlink(missing_ok=True)
            say(f"{request.out} is already prepared: {_summary(index)}")
            return index
        state = read_state(request.out) or _begin(request.out, State(arguments, source))
        if state.next_unit:
            check_same(request.out, state.arguments, state.source, arguments, source)
        elif (state.arguments, state.source) != (arguments, source):
            # Nothing is kept of a call that ended before it had encoded anything, as by a wrong --text-field.
            state = State(arguments, source)
            write_state(request.out, state)
        return _build(request, files, state, started)


def _build(request: Request, files: Sequence[SourceFile], state: State, started: float) -> TokenIndex:
    tokenizer, state = _tokenizer(request, files, state)
    path = request.out / TOKENIZER_FILE
    size = vocabulary(tokenizer)
    dtype = "uint16" if size <= 1 << 16 else "uint32"
    settings = EncoderSettings(
        path,
        dtype,
        request.seed,
        request.validation_fraction,
        request.text_field,
        _engine(request, files, tokenizer),
    )
    with ShardStore(request.out, dtype, request.shard_tokens, state) as store:
        went_on = bool(state.next_unit)
        if went_on:
            say(f"continuing in {request.out}: {size_text(state.tally.text_bytes)} of text are done")
        tally = _encode_all(request, files, store, settings)
        shards = store.finish()
    if not shards:
        raise PrepareError("the sources hold no text: all their documents are empty")
    index = TokenIndex(
        format=FORMAT,
        dtype="uint16" if dtype == "uint16" else "uint32",
        vocab_size=size,
        end_of_text=end_of_text(tokenizer, path),
        shards=shards,
        tokenizer={
            "file": TOKENIZER_FILE,
            "sha256": state.tokenizer_sha256,
            "sampled_bytes": state.sampled_bytes,
        },
        source={
            **state.source,
            "documents": tally.documents,
            "text_bytes": tally.text_bytes,
            "empty_documents": tally.empty,
            "replaced_documents": tally.replaced,
        },
        arguments=state.arguments,
    )
    write_text(request.out / INDEX_FILE, index.to_json())
    (request.out / STATE_FILE).unlink()
    _tell(request, index, tally, time.monotonic() - started, went_on=went_on)
    return index


def _encode_all(
    request: Request, files: Sequence[SourceFile], store: ShardStore, settings: EncoderSettings
) -> Tally:
    """Encode all units that the store does not hold yet; returns the tally of all of them."""
    total = sum(file.size for file in files)
    number, tally = store.state.next_unit, store.state.tally
    lengths = [sum(piece.end - piece.start for piece in unit) for unit in units(files)]
    done = sum(lengths[:number])
    todo = islice(units(files), number, None)
    workers = max(1, min(request.workers, len(lengths) - number))
    saved = time.monotonic()
    with reporting("encoding", total, done) as report:
        for result in encode_units(todo, settings, workers):
            for split, tokens in result.tokens.items():
                store.append(split, tokens)
            _count(tally, result)
            done += lengths[number]
            number += 1
            if store.finished_since_save or time.monotonic() - saved >= SAVE_SECONDS:
                store.save(number, tally)
                saved = time.monotonic()
            report(done)
    return tally


def _count(tally: Tally, result: EncodedUnit) -> None:
    for split, documents in result.documents.items():
        tally.documents[split] += documents
    tally.text_bytes += result.text_bytes
    tally.empty += result.empty
    tally.replaced += len(result.replaced)
    if result.replaced and not tally.first_replaced:
        tally.first_replaced = result.replaced[0]


# ------------------------------------------------------------------- tokenizer


def _tokenizer(request: Request, files: Sequence[SourceFile], state: State) -> tuple[Tokenizer, State]:
    """The tokenizer in `out`, put there on the first call; and the state that records it."""
    path = request.out / TOKENIZER_FILE
    if state.tokenizer_sha256 is not None:
        text = path.read_bytes().decode("utf-8") if exists(path) else ""
        if _sha256(text) != state.tokenizer_sha256:
            raise PrepareError(f"{path} was changed; remove {request.out} and prepare again")
        return parse_tokenizer(text, path), state
    if request.tokenizer is not None:
        end_of_text(read_tokenizer(request.tokenizer), request.tokenizer)
        sampled = None
        text = request.tokenizer.read_bytes().decode("utf-8")
    else:
        started = time.monotonic()
        chosen = training_pieces(files, request)
        sampled = sum(piece.end - piece.start for piece in chosen)
        text = train_tokenizer(chosen, request).to_str(pretty=True)
        say(f"trained a tokenizer of up to {request.vocab_size} tokens in {time.monotonic() - started:.1f} s")
    write_text(path, text)
    state = State(state.arguments, state.source, _sha256(text), sampled)
    write_state(request.out, state)
    return parse_tokenizer(text, path), state


def _engine(request: Request, files: Sequence[SourceFile], tokenizer: Tokenizer) -> Engine:
    """What encodes: the fast library where it makes the same tokens of a part of this text."""
    if request.encoder == "tokenizers":
        return request.encoder
    engine, reason = choose(tokenizer, _tried(request, files))
    if reason:
        say(f"note: encoding with the tokenizers library alone: {reason}")
    return engine


def _tried(request: Request, files: Sequence[SourceFile]) -> Iterator[str]:
    left, reader = TRIED_CHARACTERS, Reader(request.text_field)
    for piece in sample(files, request.seed, TRIED_CHARACTERS):
        for document in reader.documents(piece):
            yield document.text[:left]
            left -= len(document.text)
            if left <= 0:
                return


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _finished_state(index: TokenIndex) -> State:
    return State(index.arguments, index.source, shards=index.shards)


# ------------------------------------------------------------------ directory


@contextmanager
def _exclusive(out: Path) -> Iterator[None]:
    """Hold the directory; it is made where it does not exist. Raises PrepareError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise storage_error(out, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in (INDEX_FILE, TOKENIZER_FILE, STATE_FILE):  # others' may be here, where --out is not empty
            for half_written in out.glob(f".{name}.*.tmp"):
                half_written.unlink()
        yield
    except BlockingIOError as error:
        raise PrepareError(f"another process prepares into {out}; wait for it to end") from error
    finally:
        os.close(descriptor)


def _begin(out: Path, state: State) -> State:
    foreign = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    if foreign:
        raise PrepareError(
            f"{out} holds files of something else ({', '.join(foreign[:3])}); choose an empty --out"
        )
    write_state(out, state)
    return state


# ------------------------------------------------------------------- reporting


def _summary(index: TokenIndex) -> str:
    documents, total = index.source["documents"], sum(shard.tokens for shard in index.shards)
    parts = [f"{index.tokens(split):,} {split} tokens of {documents[split]:,} documents" for split in SPLITS]
    each, size = index.source["text_bytes"] / total, size_text(total * ITEM_SIZE[index.dtype])
    return f"{', '.join(parts)}, {each:.2f} bytes of text a token, vocabulary {index.vocab_size}, {size}"


def _tell(request: Request, index: TokenIndex, tally: Tally, seconds: float, *, went_on: bool) -> None:
    since = " since it went on" if went_on else ""
    say(f"prepared {request.out} in {seconds:.1f} s{since}: {_summary(index)}")
    if not request.tokenizer and index.vocab_size < request.vocab_size:
        say(f"note: the text allows no more than {index.vocab_size} tokens of vocabulary")
    if tally.empty:
        say(f"note: {tally.empty} documents hold no text, as they are empty or null")
    if tally.replaced:
        say(
            f"warning: {tally.replaced} documents hold bytes that are no UTF-8, which became U+FFFD; the "
            f"first is in {tally.first_replaced}"
        )
    if request.validation_fraction and not index.tokens("validation"):
        say("warning: no document fell to the validation split; a larger --validation-fraction takes more")
