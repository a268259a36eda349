"""The fast encoder makes the tokens of the `tokenizers` library, or it is not used, and that is said."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from holdfast_trainer.prepare import PrepareError, Request, prepare
from holdfast_trainer.prepare.encoder import (
    ODDITIES,
    CheckedEncoder,
    FastEncoder,
    ReferenceEncoder,
    agree,
    choose,
)
from holdfast_trainer.prepare.tokenizer import parse_tokenizer

TEXT = Path(random.__file__).read_text(encoding="utf-8")


def trained(vocabulary: int = 600) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, *ODDITIES], trainer)
    return parse_tokenizer(tokenizer.to_str(), Path("trained"))


TRAINED = trained()
FAST, REFERENCE = FastEncoder(TRAINED), ReferenceEncoder(TRAINED)


def test_the_usual_kind_is_encoded_fast() -> None:
    assert choose(TRAINED, [TEXT]) == ("gigatoken", "")


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text(" \n\t's12aé😀<|endoftext|>", max_size=60))
@settings(deadline=None, max_examples=300)
def test_any_text_has_the_same_tokens(text: str) -> None:
    assert agree(FAST, REFERENCE, [text])


def no_words(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def lower(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def own_words(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_words, "gigatoken makes other tokens of '"),
        (lower, "gigatoken does not know this kind of tokenizer (Unsupported normalizer type: Lowercase)"),
        (own_words, "gigatoken does not know this kind of tokenizer (Unknown pre_tokenizer Split"),
    ],
)
def test_another_kind_is_encoded_as_before_and_the_reason_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: Callable[[Tokenizer], None], reason: str
) -> None:
    tokenizer = trained()
    change(tokenizer)
    own, source = tmp_path / "own.json", tmp_path / "random.txt"
    tokenizer.save(str(own))
    source.write_text(TEXT)
    prepare(Request((source,), tmp_path / "out", tokenizer=own, validation_fraction=0))
    assert f"note: encoding with the tokenizers library alone: {reason}" in capfd.readouterr().err


def test_shards_do_not_depend_on_who_encoded_them(tmp_path: Path) -> None:
    tokenizer = trained()
    tokenizer.add_tokens(["import os", "self.", AddedToken("def", single_word=True)])
    own, source = tmp_path / "own.json", tmp_path / "text.txt"
    tokenizer.save(str(own))
    source.write_text("\n".join([TEXT, *ODDITIES]))
    for encoder in ("auto", "tokenizers"):
        prepare(Request((source,), tmp_path / encoder, encoder=encoder, tokenizer=own, validation_fraction=0))
    written = [{p.name: p.read_bytes() for p in (tmp_path / e).iterdir()} for e in ("auto", "tokenizers")]
    assert written[0] == written[1]


def test_a_difference_met_on_the_way_stops_the_preparation() -> None:
    other = trained(400)
    encoder = CheckedEncoder(FastEncoder(other), REFERENCE)
    with pytest.raises(PrepareError) as caught:
        encoder.encode(["short", TEXT])
    assert "gigatoken and tokenizers make different tokens of" in str(caught.value)
    assert "remove what was prepared, and prepare it again with --encoder tokenizers" in str(caught.value)
    assert encoder.encode([]) == []
