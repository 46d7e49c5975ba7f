"""Which windows a step reads: a pure function of (seed, step), with nothing to store and nothing to resume."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from data.randomness import key

ROUNDS = 8


class Permutation:
    """A pseudo-random bijection of range(n) that takes no memory, however large n is.

    A Feistel network over pairs (x in Z_a, y in Z_b) with a b >= n: each round adds a hash of one half to the other,
    modulo its size, which can be undone and so is a bijection (the generalized Feistel cipher of Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). Results outside range(n) are mapped again until they are inside; as
    a b exceeds n by less than a, that is rare.
    """

    def __init__(self, n: int, seed: int) -> None:
        """Raises ValueError unless 1 <= n < 2**62."""
        if not 1 <= n < 2**62:
            raise ValueError(f"a permutation needs 1 <= n < 2**62, not n={n}")
        self.n = n
        rows = math.isqrt(n - 1) + 1
        self._sizes = (np.uint64(rows), np.uint64(-(-n // rows)))
        digest = hashlib.blake2b(repr((n, int(seed))).encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """(m,) int64 indices in range(n) -> (m,) int64. Raises ValueError for an index outside."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= self.n):
            raise ValueError(f"indices must lie in range({self.n})")
        images = self._encipher(indices.astype(np.uint64))
        while (outside := images >= self.n).any():
            images[outside] = self._encipher(images[outside])
        return images.astype(np.int64)

    def _encipher(self, values: np.ndarray) -> np.ndarray:
        halves = [values // self._sizes[1], values % self._sizes[1]]
        for number in range(ROUNDS):
            side = number % 2
            mixed = (halves[1 - side] + self._keys[number]) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(32)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            # The upper 48 bits are the well-mixed ones; more could overflow in the sum, and break the bijection.
            mixed >>= np.uint64(16)
            mixed += halves[side]
            mixed %= self._sizes[side]
            halves[side] = mixed
        return halves[0] * self._sizes[1] + halves[1]


class Stream:
    """The order in which fixed windows are read: every epoch takes each one once, in an order of its own.

    Row r of step s is sample i = s * global_batch + r of the run, and sample i is window P_e(i mod n_windows) of epoch
    e = i // n_windows. World size, micro batches and the model play no part. A step may lie across two epochs.
    """

    def __init__(self, n_windows: int, *, global_batch: int, seed: int) -> None:
        """Raises ValueError for a global_batch or n_windows below 1."""
        if global_batch < 1 or n_windows < 1:
            raise ValueError(f"global_batch={global_batch}, n_windows={n_windows}: both must be at least 1")
        self.n_windows = n_windows
        self.global_batch = global_batch
        self.seed = seed
        self._latest: dict[int, Permutation] = {}  # of one or two epochs: making one takes a while

    def windows(self, step: int) -> np.ndarray:
        """(global_batch,) int64 window numbers of a step. Raises ValueError for a negative step."""
        if step < 0:
            raise ValueError(f"step={step}: must not be negative")
        samples = step * self.global_batch + np.arange(self.global_batch, dtype=np.int64)
        first, last = int(samples[0]) // self.n_windows, int(samples[-1]) // self.n_windows
        if first == last:
            return self._epoch(first)(samples - first * self.n_windows)
        epochs, positions = np.divmod(samples, self.n_windows)
        windows = np.empty_like(samples)
        for epoch in range(first, last + 1):
            windows[epochs == epoch] = self._epoch(epoch)(positions[epochs == epoch])
        return windows

    def _epoch(self, epoch: int) -> Permutation:
        latest = self._latest  # replaced, never changed: threads may share the stream
        if epoch not in latest:
            made = Permutation(self.n_windows, key("stream", self.seed, epoch))
            latest = self._latest = dict([*latest.items()][-1:]) | {epoch: made}
        return latest[epoch]
