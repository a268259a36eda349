"""The command line of `prepare`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ..schema import place_given
from ..token_index import DataError
from .build import prepare
from .corpus import DEFAULT_PATTERNS, Request
from .progress import say

EPILOG = """\
A file is text (one document; a long one is cut at line ends into several) or, by its suffix, JSON lines
(.jsonl, .ndjson: one document a line) or a table (.parquet, .arrow: one document a row). Text and JSON lines
may be compressed (.gz, .zst). A directory that Hugging Face's `datasets` saved is read as it says itself.
Sources are read in pieces: they may be larger than memory. Equal text and equal arguments give equal bytes,
whatever --workers is. A preparation that was stopped goes on when the same command is given again.

example: the standard library's sources, without its tests
  python -m holdfast_trainer prepare --source /usr/lib/python3.11 --pattern '*.py' \\
      --exclude site-packages --exclude test --exclude tests --out build/data
then set data.path to build/data, and model.vocab_size to at least the vocabulary that is shown.
"""


def build_parser() -> argparse.ArgumentParser:
    """All options of the command, with their reasons."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast_trainer prepare",
        description="Turn text into token shards that a training run memory-maps.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Request(sources=(), out=Path())
    add = parser.add_argument
    # fmt: off
    add("--source", nargs="+", action="extend", required=True, type=place_given, metavar="PATH",
        help="files and directories, in the order their documents shall have")
    add("--out", required=True, type=place_given, metavar="DIR",
        help="directory for the shards; made where it does not exist")
    add("--tokenizer", type=place_given, metavar="FILE",
        help="a tokenizer.json to use; without it a byte-level BPE is trained on a sample of the text")
    add("--encoder", choices=("auto", "tokenizers"), default=default.encoder,
        help="auto: gigatoken where it makes the same tokens, many times faster (%(default)s)")
    add("--vocab-size", type=int, default=default.vocab_size, metavar="N",
        help="tokens of the trained tokenizer (%(default)s); up to 65536 a token takes 2 bytes, then 4")
    add("--workers", type=int, default=available_cores(), metavar="N",
        help="processes that encode (here: %(default)s, one a core)")
    add("--validation-fraction", type=float, default=default.validation_fraction, metavar="F",
        help="share of the documents kept for validation, by hash of their content (%(default)s)")
    add("--pattern", action="append", metavar="GLOB",
        help=f"files to take from directories; may be repeated ({' '.join(DEFAULT_PATTERNS)})")
    add("--exclude", action="append", default=[], metavar="GLOB",
        help="files and directories to leave out, by name or by path below the source; may be repeated")
    add("--text-field", default=default.text_field, metavar="KEY",
        help="where the text is in a JSON line or a row (%(default)s)")
    add("--shard-tokens", type=int, default=default.shard_tokens, metavar="N",
        help="tokens a shard file (%(default)s)")
    add("--seed", type=int, default=default.seed, metavar="N",
        help="of the split and of the tokenizer's sample (%(default)s)")
    # fmt: on
    return parser


def available_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare; 0 when done, 1 after an error (told on standard error), 130 after Ctrl-C."""
    options = build_parser().parse_args(argv)
    request = Request(
        sources=tuple(options.source),
        out=options.out,
        encoder=options.encoder,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        workers=options.workers,
        validation_fraction=options.validation_fraction,
        patterns=tuple(options.pattern or DEFAULT_PATTERNS),
        excludes=tuple(options.exclude),
        text_field=options.text_field,
        shard_tokens=options.shard_tokens,
        seed=options.seed,
    )
    try:
        prepare(request)
    except DataError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say(f"stopped; the same command continues in {request.out}")
        return 130
    return 0
