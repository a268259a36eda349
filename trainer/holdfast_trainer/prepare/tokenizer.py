"""The tokenizer: trained on a bounded sample of the corpus, or taken from a file.

Training is byte-level BPE (Sennrich et al. 2016; Radford et al. 2019 for bytes) by the `tokenizers`
library. The sample is the pieces whose hash comes first, up to `SAMPLE_BYTES`: the same for the same
text, spread over all of it, and without what the split keeps for validation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import Piece, PrepareError, Request, SourceFile, pieces, split_of
from .reading import Reader

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SAMPLE_BYTES = 8 << 20
"""Enough for small vocabularies: merges are ranked by frequency, and a few MB settle the ranks."""
LEAST_VOCABULARY = 257
"""Every byte, and the end of text."""


def train_tokenizer(chosen: Sequence[Piece], request: Request) -> Tokenizer:
    """A byte-level BPE of at most `request.vocab_size` entries. Raises PrepareError without text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=request.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = list(_texts(chosen, request))
    if not texts:
        raise PrepareError("the sources hold no text to train a tokenizer on: all their documents are empty")
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample(files: Sequence[SourceFile], seed: int, limit: int = SAMPLE_BYTES) -> list[Piece]:
    """Pieces of `limit` bytes together (at least one), chosen by hash, in their order."""

    def rank(piece: Piece) -> bytes:
        return hashlib.sha256(f"{seed}:{piece.file.sha256}:{piece.start}".encode()).digest()

    everything = list(pieces(files))
    chosen = []
    for number in sorted(range(len(everything)), key=lambda number: rank(everything[number])):
        chosen.append(number)
        limit -= everything[number].end - everything[number].start
        if limit <= 0:
            break
    return [everything[number] for number in sorted(chosen)]


def training_pieces(files: Sequence[SourceFile], request: Request) -> list[Piece]:
    """The sample that a tokenizer is trained on. Where no text starts in it, because a line is longer than
    many pieces or most documents are empty, also the others, in their order, as far as the first that has."""
    reader = Reader(request.text_field)

    def has_text(piece: Piece) -> bool:
        return any(document.text for document in reader.documents(piece))

    chosen = sample(files, request.seed)
    if any(map(has_text, chosen)):
        return chosen
    known = set(chosen)
    for piece in pieces(files):
        if piece not in known:
            chosen.append(piece)
            if has_text(piece):
                break
    return chosen


def _texts(chosen: Sequence[Piece], request: Request) -> Iterator[str]:
    held_out = []
    found = False
    reader = Reader(request.text_field)
    for piece in chosen:
        for document in reader.documents(piece):
            if split_of(document.text.encode("utf-8"), request.seed, request.validation_fraction) == "train":
                found = found or bool(document.text)
                yield document.text[:SAMPLE_BYTES]
            elif not found:
                held_out.append(document.text[:SAMPLE_BYTES])
    if not found:
        yield from filter(None, held_out)


def read_tokenizer(path: Path) -> Tokenizer:
    """Raises PrepareError where the file is missing or is no tokenizer.json."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise PrepareError(f"tokenizer {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise PrepareError(f"tokenizer {path} cannot be read: {error}") from error
    return parse_tokenizer(text, path)


def parse_tokenizer(text: str, path: Path) -> Tokenizer:
    """The tokenizer in the text of a tokenizer.json, set to encode whole documents literally."""
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise PrepareError(
            f"tokenizer {path} is not a tokenizer.json of the `tokenizers` library: {error}"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Text that happens to contain "<|endoftext|>" must not end a document.
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_of_text(tokenizer: Tokenizer, path: Path) -> int:
    """The id that ends a document. Raises PrepareError where the tokenizer has none."""
    for name in KNOWN_ENDS:
        number = tokenizer.token_to_id(name)
        if number is not None:
            return int(number)
    raise PrepareError(
        f"tokenizer {path} has no end-of-text token: add one of {', '.join(KNOWN_ENDS)} to its special tokens"
    )


def vocabulary(tokenizer: Tokenizer) -> int:
    """One more than the highest id: ids may have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
