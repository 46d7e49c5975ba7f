"""MAD: in-context recall, plain and noisy.

Poli et al., "Mechanistic design and scaling of hybrid architectures", 2024, section 3.1 and appendix B, with the baseline
and the axes of difficulty of the reference code, mad-lab. What differs: training grades what evaluation grades (mad-lab
trains on every next token), the pair that is asked last is certain to exist, and no map from keys to values is in two
splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from data.tasks import register
from data.tasks.base import IGNORED, Examples, TaskConfig, require
from data.tasks.copying import after_first
from data.tasks.draw import binned, bins, occurrences, unordered


@register
@dataclass
class MadRecallConfig(TaskConfig):
    """k v k v k v ..., each key with one value per example; the next token after each key that has come before.

    The first half of the tokens are keys, the second values. Chance: one in the number of values. Solved by a lookup by
    content, as MQAR, but with answers shown and facts repeated. Slices: ``gap``, from the latest value to the query.
    """

    kind: str = "mad_recall"
    seq_len: int = 128
    eval_examples: int = 1280
    train_examples: int | None = 12800
    n_tokens: int = 16

    lows: ClassVar[dict[str, int]] = {"n_tokens": 4, "seq_len": 4}
    noise: ClassVar[tuple[float, int]] = (0.0, 0)  # share of pairs that are noise, and tokens of noise

    def check(self, path: str) -> None:
        super().check(path)
        require(self.seq_len % 2 == 0, f"{path}.seq_len={self.seq_len}: must be even, for whole pairs")

    @property
    def _noise(self) -> tuple[float, int]:
        return self.noise

    @property
    def vocab_size(self) -> int:
        return self.n_tokens + self._noise[1]

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"gap": bins(self.seq_len)}

    def chance(self) -> float:
        return 1 / (self.n_tokens - self.n_tokens // 2)

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        n_keys, pairs, (share, n_noise) = self.n_tokens // 2, self.seq_len // 2, self._noise
        table = rng.integers(n_keys, self.n_tokens, size=(n, n_keys))
        keys = rng.integers(n_keys, size=(n, pairs))
        noisy = np.zeros((n, pairs), dtype=bool)
        if share > 0:
            noisy = rng.random((n, pairs)) < share
            noisy[np.arange(n), rng.integers(pairs - 1, size=n)] = False  # there is something to ask for
            noisy[:, -1] = False
        # The last pair asks for one of the keys that came, each alike however often it came.
        came = np.zeros((n, n_keys), dtype=bool)
        rows, columns = np.nonzero(~noisy[:, :-1])
        came[rows, keys[rows, columns]] = True
        keys[:, -1] = np.argmax(np.where(came, rng.random((n, n_keys)), -1.0), axis=1)
        values = np.take_along_axis(table, keys, axis=1)
        first, previous = occurrences(np.where(noisy, -1 - np.arange(pairs), keys))
        fresh = (first == np.arange(pairs)) & ~noisy
        content = unordered(keys * self.vocab_size + values, fresh)
        if share > 0:
            noise = rng.integers(self.n_tokens, self.n_tokens + n_noise, size=(2, n, pairs))
            keys, shown = np.where(noisy, noise[0], keys), np.where(noisy, noise[1], values)
        else:
            shown = values
        inputs = np.stack([keys, shown], axis=2).reshape(n, self.seq_len)
        targets = np.full(inputs.shape, IGNORED)
        targets[:, ::2] = np.where(previous >= 0, values, IGNORED)
        gap = np.full(inputs.shape, -1)
        gap[:, ::2] = np.where(previous >= 0, binned(2 * (np.arange(pairs) - previous) - 1), -1)
        return Examples(inputs, targets, content, {"gap": gap})

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The token after the first occurrence of each key."""
        return after_first(inputs, self.vocab_size)


@register
@dataclass
class MadNoisyRecallConfig(MadRecallConfig):
    """In-context recall where a share of the pairs are two tokens of noise, from a range of their own.

    Chance and solution as for mad_recall, and the noise must be passed over.
    """

    kind: str = "mad_noisy_recall"
    noise_share: float = 0.2
    n_noise: int = 16

    def check(self, path: str) -> None:
        super().check(path)
        require(0 <= self.noise_share < 1, f"{path}.noise_share={self.noise_share}: must be at least 0 and less than 1")

    @property
    def _noise(self) -> tuple[float, int]:
        return self.noise_share, self.n_noise
