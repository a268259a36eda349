"""Three trainings set up badly, each in a way that people do, and what the guide makes of their code.

`loader`: batches of one text that is tokenised while it is wanted, no workers, the optimizer's loop.
`ragged`: sequences of different length, gone through one by one, with tensors made from Python's values.
`precision`: a GPT in fp32 with the optimizer's loop and nothing accumulated.

Each has a version mended by hand where the guide asks for a change of code (`*_mended`); what `tune` changes
by itself is measured on both. The ragged versions compute the same loss; so a test holds.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from holdfast_trainer.config import ModelConfig
from holdfast_trainer.model import GPT
from holdfast_trainer.tune.settings import Settings
from holdfast_trainer.tune.workload import Workload

CONTEXT = 64
VOCABULARY = 512
TEXTS = 4096
BAD = Settings(batch=1, threads=1)


# ---------------------------------------------------------------------- loader


@functools.cache
def texts() -> tuple[str, ...]:
    """Sentences of made-up words, the same every time."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnopqrst", k=chance.randint(2, 9))) for _ in range(2000)]
    return tuple(" ".join(chance.choices(words, k=60)) for _ in range(TEXTS))


@functools.cache
def tokenizer() -> Any:
    """A byte-pair encoding trained on these texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(texts()[:200], trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    return made


def encoded(text: str) -> Tensor:
    """[CONTEXT + 1]"""
    return torch.tensor((tokenizer().encode(text).ids * 2)[: CONTEXT + 1])


class TokenisedWhenAsked(Dataset[Tensor]):
    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, index: int) -> Tensor:
        return encoded(texts()[index])


class Tokenised(TokenisedWhenAsked):
    """The same, tokenised once, before."""

    def __init__(self) -> None:
        encodings = tokenizer().encode_batch(list(texts()))
        self._rows = torch.tensor([(one.ids * 2)[: CONTEXT + 1] for one in encodings])

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


def gpt(width: int = 256) -> GPT:
    return GPT(ModelConfig(vocab_size=VOCABULARY, layers=4, heads=4, width=width, context=CONTEXT))


def language_loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch[:, :-1], batch[:, 1:])[1]
    return loss


def loader() -> Workload:
    return Workload(gpt, TokenisedWhenAsked(), language_loss, BAD)


def loader_mended() -> Workload:
    return Workload(gpt, Tokenised(), language_loss, BAD)


# ---------------------------------------------------------------------- ragged

WIDTH, CLASSES, LONGEST = 64, 8, 48


@dataclass(frozen=True)
class Sequences(Dataset[tuple[list[int], int]]):
    """Lists of numbers, each of its own length, and a class."""

    count: int = 2048

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        chance = random.Random(index)
        length = chance.randint(8, LONGEST)
        return [chance.randrange(VOCABULARY) for _ in range(length)], index % CLASSES


class Attending(nn.Module):
    """Embedding, position, one layer of attention, mean, class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Linear(1, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)


class OneByOne(Attending):
    """As it is often written first: a loop over sequences, and in it one over their tokens."""

    def forward(self, batch: list[tuple[list[int], int]]) -> Tensor:
        rows = []
        for tokens, _ in batch:
            embedded = []
            for place, token in enumerate(tokens):
                at = self.position(torch.tensor([place / LONGEST]))
                embedded.append(self.embedding(torch.tensor(token)) + at)
            x = torch.stack(embedded)
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
            rows.append(self.out(mixed.mean(dim=0)))
        return torch.stack(rows)


class Together(Attending):
    """The same for the whole batch, padded, with a mask; what does not change is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(LONGEST).float()[:, None] / LONGEST, persistent=False)

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, real, _ = batch
        places: Tensor = self.get_buffer("places")[: tokens.shape[1]]
        x = self.embedding(tokens) + self.position(places)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, :])
        weights = real / real.sum(dim=1, keepdim=True)
        out: Tensor = self.out(torch.bmm(weights[:, None], mixed)[:, 0])
        return out


def keep(samples: list[Any]) -> list[Any]:
    return samples


def padded(samples: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, T], which of them are real [B, T], classes [B]; written into arrays made once a batch."""
    longest = max(len(tokens) for tokens, _ in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    real = torch.zeros(len(samples), longest, dtype=torch.bool)
    array, mask = tokens.numpy(), real.numpy()
    for row, (content, _) in enumerate(samples):
        array[row, : len(content)] = content
        mask[row, : len(content)] = True
    return tokens, real, torch.tensor([label for _, label in samples])


def ragged_loss(model: nn.Module, batch: list[tuple[list[int], int]]) -> Tensor:
    return F.cross_entropy(model(batch), torch.tensor([label for _, label in batch]))


def padded_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch), batch[2])


def ragged() -> Workload:
    return Workload(OneByOne, Sequences(), ragged_loss, Settings(batch=16, threads=1), keep)


def ragged_mended() -> Workload:
    return Workload(Together, Sequences(), padded_loss, Settings(batch=16, threads=1), padded)


# ------------------------------------------------------------------- precision


def precision() -> Workload:
    def optimizer(parameters: Iterable[nn.Parameter], fused: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=fused, foreach=None if fused else False)

    settings = Settings(batch=2, threads=1)
    return Workload(functools.partial(gpt, 384), Tokenised(), language_loss, settings, None, optimizer)
