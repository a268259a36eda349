"""Text to token numbers, as fast as can be had without changing a single one of them.

The `tokenizers` library says what the tokens of a text are. Gigatoken finds the same ones many times
faster, for most byte-level tokenizers, with a cache of words where `tokenizers` merges each anew. It is
used only where it agrees: on a text of oddities and on a sample of the corpus before the start, and then
on a part of every unit. So the shards do not depend on which of the two wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .corpus import PrepareError

Engine = Literal["tokenizers", "gigatoken"]
Tokens = NDArray[np.unsignedinteger]

FORGET_BYTES = 128 << 20
"""Of text, after which gigatoken is loaded anew: its cache of words has no bound of its own."""

CHECKED_CHARACTERS = 4096
"""Of every unit, encoded by both: 0.4 % of the text."""

ODDITIES = (
    "it's WE'LL 'twas '' ''s 12３½Ⅷ² naïve n\u0303 e\u0301 ﬁ ß İ ÿ",
    "\x00\x01\x7f\x80 \ufeff\ufffd \u200b\u200d \u2028\u2029 \x85 \u3000 \xa0 x",
    "tab\t\tand \r\n\r\n lines \n\n\n   and spaces   \f\v end ",
    "👨‍👩‍👧 🇩🇪 中文字符 日本語テキスト 한국어 العربية हिन्दी ไทย עברית",
    "<|endoftext|> </s> <s> [MASK] <pad> <|im_start|>",
    "a" * 300 + " " * 300 + "\n" * 300 + "é" * 300 + "1" * 300 + "=" * 300,
    "https://a.example/?q=1&r=%20 x_y-z.w::v->u  //!@#$%^&*()[]{}|\\\"'`~",
)
"""Where encoders differ first: kinds of space, digits, marks, controls, contractions, runs, named tokens."""


class Encoder(Protocol):
    """Encodes whole documents, without any token around them."""

    def encode(self, texts: Sequence[str]) -> list[Tokens]: ...


class ReferenceEncoder:
    """The `tokenizers` library itself."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


class FastEncoder:
    """Gigatoken, with the tokens of a `tokenizer.json`, taking no text for a special token."""

    def __init__(self, tokenizer: Tokenizer):
        """Raises ValueError where it does not know this kind of tokenizer, ImportError without it."""
        body = json.loads(tokenizer.to_str())
        body["added_tokens"] = [token for token in body["added_tokens"] if not token["special"]]
        self._json = json.dumps(body)
        self._load()

    def _load(self) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._backend = load_hf_json(self._json)
        self._read = 0

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        if self._read > FORGET_BYTES:
            self._load()
        self._read += sum(map(len, texts))
        return [self._backend.encode(text) for text in texts]


class CheckedEncoder:
    """A fast encoder that is compared with the reference on a part of all that it encodes."""

    def __init__(self, fast: Encoder, reference: Encoder):
        self._fast, self._reference = fast, reference

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Raises PrepareError where the two disagree."""
        part = _middle(max(texts, key=len, default=""))
        if not agree(self._fast, self._reference, [part]):
            raise PrepareError(
                f"gigatoken and tokenizers make different tokens of {part[:60]!r}...: remove what was "
                f"prepared, and prepare it again with --encoder tokenizers (a TokenStream: encoder="
                f"'tokenizers', in a new run directory)"
            )
        return self._fast.encode(texts)


def agree(first: Encoder, second: Encoder, texts: Sequence[str]) -> bool:
    """Whether both make the same tokens of each text."""
    pairs = zip(first.encode(texts), second.encode(texts), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def choose(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[Engine, str]:
    """The engine for this tokenizer, tried on `texts` and on oddities; and why, where it is the slow one."""
    try:
        fast = FastEncoder(tokenizer)
    except ImportError as error:
        return "tokenizers", f"gigatoken is not installed ({error})"
    except Exception as error:  # the library raises several kinds, and each means the same
        reason = str(error).partition("\n")[0]
        return "tokenizers", f"gigatoken does not know this kind of tokenizer ({reason})"
    reference = ReferenceEncoder(tokenizer)
    for text in (*ODDITIES, *texts):
        if not agree(fast, reference, [text]):
            return "tokenizers", f"gigatoken makes other tokens of {text[:60]!r}"
    return "gigatoken", ""


def load(engine: Engine, tokenizer: Tokenizer) -> Encoder:
    """An encoder as `choose` named it."""
    reference = ReferenceEncoder(tokenizer)
    return CheckedEncoder(FastEncoder(tokenizer), reference) if engine == "gigatoken" else reference


def _middle(text: str) -> str:
    start = max(0, (len(text) - CHECKED_CHARACTERS) // 2)
    return text[start : start + CHECKED_CHARACTERS]
