"""A pseudo-random permutation of 0..n-1 that is computed point by point, in constant memory.

A generalised Feistel network on pairs (left, right) in Z_a x Z_b with a x b barely above n, and cycle
walking for the few points outside: method 3 of Black and Rogaway, "Ciphers with Arbitrary Finite
Domains" (CT-RSA 2002), after Luby and Rackoff (1988). The round function is the finaliser of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): well mixed and fast, not secret.

Every arithmetic step is on 64-bit unsigned integers modulo 2**64, so the order is the same on every
machine and with every version of numpy.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

ROUNDS = 8
LEAST_SIDE = 4
"""Smaller networks reach only some of the permutations; tiny sizes walk a little longer instead."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def permute(points: U64, keys: U64, size: int) -> U64:
    """Where each of `points` (all below `size`) goes, under the permutation that its key chooses.

    `points` and `keys` have one shape; keys equal to each other share a permutation of 0..size-1.
    """
    rows = np.uint64(max(LEAST_SIDE, math.isqrt(size)))
    columns = np.uint64(max(LEAST_SIDE, -(-size // int(rows))))
    offsets = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    round_keys = mix(keys[None, :] + offsets[:, None])
    result = _feistel(points, round_keys, rows, columns)
    outside = np.nonzero(result >= size)[0]
    while outside.size:
        result[outside] = _feistel(result[outside], round_keys[:, outside], rows, columns)
        outside = outside[result[outside] >= size]
    return result


def sample_order(seed: int, numbers: U64, size: int) -> U64:
    """Which of `size` samples those with these `numbers` (one dimension) in a run are.

    Each epoch of a seed has a permutation of its own.
    """
    return permute(numbers % np.uint64(size), epoch_keys(seed, numbers // np.uint64(size)), size)


def numbered(first: int, count: int) -> U64:
    """The numbers of `count` samples of a run, from `first` on."""
    return np.arange(first, first + count, dtype=np.uint64)


def _feistel(points: U64, round_keys: U64, rows: np.uint64, columns: np.uint64) -> U64:
    left, right = points // columns, points % columns
    for number in range(0, ROUNDS, 2):
        left = (left + mix(right ^ round_keys[number]) % rows) % rows
        right = (right + mix(left ^ round_keys[number + 1]) % columns) % columns
    result: U64 = left * columns + right
    return result


def mix(values: U64) -> U64:
    """The finaliser of SplitMix64: a bijection of 64-bit words whose output looks random."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def epoch_keys(seed: int, epochs: U64) -> U64:
    """One key for each epoch number under `seed`."""
    start = mix(np.array([(seed * _GOLDEN + 1) & _MASK], dtype=np.uint64))
    return mix(epochs * np.uint64(_GOLDEN) ^ start)
