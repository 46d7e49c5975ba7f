"""Drawing and hashing for whole batches of examples at a time. N examples, one a row; no loop over them."""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, a bijection that leaves no trace of its argument (the finaliser of splitmix64; Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_rows(rows: np.ndarray) -> np.ndarray:
    """(N, K) int64 -> (N,) uint64. Equal rows, equal hashes; integer arithmetic, so the same on every machine."""
    columns = np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * GOLDEN
    return mix(mix(rows.astype(np.uint64) + columns).sum(axis=1, dtype=np.uint64))


def unordered(values: np.ndarray, present: np.ndarray | None = None) -> np.ndarray:
    """(N, K) int64 -> (N, 1) int64 that depends on each row's values (where ``present``), not on their order."""
    mixed = mix(values.astype(np.uint64) + GOLDEN)
    if present is not None:
        mixed *= present
    return mixed.sum(axis=1, keepdims=True, dtype=np.uint64).astype(np.int64)


def distinct(rng: np.random.Generator, n: int, population: int, k: int) -> np.ndarray:
    """(n, k) int64: in each row k different numbers of range(population), in random order, all such rows alike.

    Raises ValueError if there are not that many.
    """
    if k > population:
        raise ValueError(f"cannot draw {k} different numbers of {population}")
    if k <= 8:
        return _shifted(rng, n, population, k)
    if k * k > population:
        return rng.permuted(np.broadcast_to(np.arange(population), (n, population)), axis=1)[:, :k]
    rows = rng.integers(population, size=(n, k))
    while True:  # at most half of the rows have a number twice
        ordered = np.sort(rows, axis=1)
        twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if not twice.size:
            return rows
        rows[twice] = rng.integers(population, size=(twice.size, k))


def _shifted(rng: np.random.Generator, n: int, population: int, k: int) -> np.ndarray:
    """For small k: the j-th number is drawn of population - j and moved past those that are taken."""
    rows = np.empty((n, k), dtype=np.int64)
    for j in range(k):
        rows[:, j] = rng.integers(population - j, size=n)
        for taken in np.sort(rows[:, :j], axis=1).T:
            rows[:, j] += rows[:, j] >= taken
    return rows


def occurrences(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N, P) int64 ids -> for each entry, the index of the first equal one in its row (itself, if it is the first) and
    of the last equal one before it (-1: none). Both (N, P) int64. The range of ids times P must be below 2^63."""
    # Each id with its place in one number: sorting numbers is several times faster than a stable sort of indices.
    numbered = (ids - ids.min()) * ids.shape[1] + np.arange(ids.shape[1])
    numbered.sort(axis=1)
    ordered, order = np.divmod(numbered, ids.shape[1])
    again = np.zeros(ids.shape, dtype=bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    starts = np.maximum.accumulate(np.where(again, 0, np.arange(ids.shape[1])), axis=1)
    before = np.full(ids.shape, -1)
    before[:, 1:] = np.where(again[:, 1:], order[:, :-1], -1)
    first, previous = np.empty_like(order), np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, starts, axis=1), axis=1)
    np.put_along_axis(previous, order, before, axis=1)
    return first, previous


def binned(values: np.ndarray) -> np.ndarray:
    """The largest of 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not above each value: two labels an octave. Slices of
    distances carry them."""
    values = np.asarray(values, dtype=np.int64)
    _, exponents = np.frexp(values.astype(np.float64))
    power = np.int64(1) << np.maximum(exponents - 1, 0).astype(np.int64)
    return np.where(values > 0, power + (values - power >= power // 2) * (power // 2), 0)


def bins(highest: int) -> list[int]:
    """Every label that ``binned`` gives to 0 ... ``highest``."""
    powers = [1 << exponent for exponent in range(max(highest, 0).bit_length())]
    return sorted({0, *powers, *(power + power // 2 for power in powers if power + power // 2 <= highest)})
