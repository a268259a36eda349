"""What is asked of a preparation: whether it can be, and whether a directory is of the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .corpus import PIECE_BYTES, PrepareError, Request, SourceFile
from .listing import corpus_digest
from .tokenizer import LEAST_VOCABULARY, SAMPLE_BYTES, read_tokenizer

MOST_VOCABULARY = 1 << 24
"""Of a tokenizer that is trained, which takes memory for all of it before it begins."""
LEAST_SHARD = 1024
"""Tokens; below it a large corpus would be a crowd of files."""


def check(request: Request) -> None:
    """Raises PrepareError for what can not be; names the option."""
    if request.tokenizer is None and request.vocab_size < LEAST_VOCABULARY:
        raise PrepareError(
            f"--vocab-size {request.vocab_size}: must be at least {LEAST_VOCABULARY}, which is every byte "
            f"and the end of text"
        )
    if request.tokenizer is None and request.vocab_size > MOST_VOCABULARY:
        raise PrepareError(f"--vocab-size {request.vocab_size}: must be at most {MOST_VOCABULARY}")
    if request.workers < 1:
        raise PrepareError(f"--workers {request.workers}: must be at least 1")
    if not 0 <= request.validation_fraction < 1:
        raise PrepareError(
            f"--validation-fraction {request.validation_fraction}: must be at least 0 and below 1"
        )
    if request.shard_tokens < LEAST_SHARD:
        raise PrepareError(f"--shard-tokens {request.shard_tokens}: must be at least {LEAST_SHARD}")


def arguments_of(request: Request) -> dict[str, Any]:
    """What determines the output apart from the text."""
    custom = request.tokenizer
    if custom is not None:
        read_tokenizer(custom)
    return {
        "tokenizer": hashlib.sha256(custom.read_bytes()).hexdigest() if custom else None,
        "vocab_size": None if custom else request.vocab_size,
        "validation_fraction": request.validation_fraction,
        "text_field": request.text_field,
        "shard_tokens": request.shard_tokens,
        "seed": request.seed,
        "sample_bytes": None if custom else SAMPLE_BYTES,
        "piece_bytes": PIECE_BYTES,
    }


def source_of(files: Sequence[SourceFile]) -> dict[str, Any]:
    """What the text is, whatever it is made into."""
    return {
        "sha256": corpus_digest(files),
        "files": len(files),
        "bytes": sum(file.size for file in files),
    }


def check_same(
    out: Path,
    old_arguments: dict[str, Any],
    old_source: dict[str, Any],
    arguments: dict[str, Any],
    source: dict[str, Any],
) -> None:
    """Raises PrepareError where a directory belongs to another preparation, and says how it differs."""
    differences = [
        f"--{name.replace('_', '-')} was {old_arguments.get(name)}, now {value}"
        for name, value in arguments.items()
        if old_arguments.get(name) != value
    ]
    if old_source.get("sha256") != source["sha256"]:
        differences.append(
            f"the text was {old_source.get('files')} files with {old_source.get('bytes')} bytes, now "
            f"{source['files']} files with {source['bytes']} bytes (or their contents changed)"
        )
    if differences:
        raise PrepareError(
            f"{out} belongs to another preparation: {'; '.join(differences)}. Choose another --out, or "
            f"remove {out}"
        )
