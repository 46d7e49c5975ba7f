"""Multi-query associative recall: key-value pairs, filler, and then each key again.

Arora, Eyuboglu et al., "Zoology: Measuring and improving recall in efficient language models", 2023, section 3.2 and
appendix E. What differs from the reference code: filler has tokens of its own, so it can neither bind a key anew nor
repeat a query; the number of pairs may vary from example to example; and a key may be asked for more than once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from data.tasks import register
from data.tasks.base import IGNORED, Examples, TaskConfig, require
from data.tasks.copying import after_first
from data.tasks.draw import binned, bins, distinct, unordered


@register
@dataclass
class MqarConfig(TaskConfig):
    """k1 v1 k2 v2 ... filler ... k2 ... filler ... k1 ...; at each later k, a label: its value.

    The answer is never shown, so no query helps another. Keys, values and filler are three ranges of tokens, in this
    order. Chance, for a model that has the values but not whose they are: one in the number of pairs. Solved by any
    exact content-based lookup: softmax attention in two layers, or a state that holds all pairs apart.
    """

    kind: str = "mqar"

    pairs: list[int] = field(default_factory=lambda: [2, 4])
    """Each example has one of these numbers of pairs, all equally likely."""

    asks: int = 6
    """Queries for each key. The paper has one; more make training much shorter, and change nothing of what must be
    stored."""

    n_keys: int = 8
    n_values: int = 8
    n_filler: int = 8

    min_gap: int = 1
    """Least distance from a value to the query for it, in tokens. W keys of reach in each of L layers carry
    L (W - 1) tokens: a gap above that cannot be bridged by a sliding window."""

    power: float = 0.01
    """Queries come soon or late by a power law: slot s is drawn with weight s^(power - 1). 1.0: all slots alike."""

    lows: ClassVar[dict[str, int]] = {"n_keys": 2, "n_values": 2}

    def check(self, path: str) -> None:
        super().check(path)
        require(
            bool(self.pairs) and min(self.pairs) >= 1 and len(set(self.pairs)) == len(self.pairs),
            f"{path}.pairs={self.pairs}: must be different numbers of at least 1, as in [4,8]",
        )
        for name in ("n_keys", "n_values"):
            value = getattr(self, name)
            require(
                value >= max(self.pairs),
                f"{path}.{name}={value}: must be at least {max(self.pairs)}, the most of {path}.pairs",
            )
        require(0 < self.power <= 1, f"{path}.power={self.power}: must be above 0 and at most 1")
        most = max(self.pairs)
        self.require_length(
            path,
            2 * most * (1 + self.asks) + self._pause,
            f"for {most} pairs, {self.asks * most} queries and {path}.min_gap",
        )

    @property
    def _pause(self) -> int:
        """Filler between the last value and the first slot for a query; even."""
        return self.min_gap // 2 * 2

    @property
    def vocab_size(self) -> int:
        return self.n_keys + self.n_values + self.n_filler

    @property
    def n_graded(self) -> int | None:
        return self.pairs[0] * self.asks if len(self.pairs) == 1 else None

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"pairs": sorted(self.pairs), "gap": bins(self.seq_len)}

    def chance(self) -> float:
        return len(self.pairs) / sum(self.pairs)

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        most, length = max(self.pairs), self.seq_len
        n_pairs = np.asarray(self.pairs)[rng.integers(len(self.pairs), size=n)]
        keys = distinct(rng, n, self.n_keys, most)
        values = self.n_keys + distinct(rng, n, self.n_values, most)
        used = np.arange(most) < n_pairs[:, None]
        inputs = rng.integers(self.n_keys + self.n_values, self.vocab_size, size=(n, length))
        inputs[:, 0 : 2 * most : 2] = np.where(used, keys, inputs[:, 0 : 2 * most : 2])
        inputs[:, 1 : 2 * most : 2] = np.where(used, values, inputs[:, 1 : 2 * most : 2])
        # Slots of two tokens, as in the paper. The highest of log-weight + Gumbel noise are a draw without replacement.
        begin = 2 * n_pairs + self._pause
        slots = -(-(length - 2 * min(self.pairs) - self._pause) // 2)
        noise = rng.gumbel(size=(n, slots)) + (self.power - 1) * np.log(np.arange(1, slots + 1))
        noise[begin[:, None] + 2 * np.arange(slots) >= length] = -np.inf
        queries = most * self.asks
        chosen = np.argpartition(-noise, queries - 1, axis=1)[:, :queries]
        rank = np.argsort(-np.take_along_axis(noise, chosen, axis=1), axis=1)
        where = begin[:, None] + 2 * np.take_along_axis(chosen, rank, axis=1)
        # The likeliest slots in order, and any order of the pairs that are asked for; unused ones stay behind.
        asked = np.tile(used, self.asks)
        order = np.argsort(np.where(asked, rng.random(asked.shape), 2.0), axis=1) % most
        row, column = np.nonzero(np.arange(queries) < self.asks * n_pairs[:, None])
        pair, place = order[row, column], where[row, column]
        inputs[row, place] = keys[row, pair]
        targets = np.full((n, length), IGNORED)
        targets[row, place] = values[row, pair]
        gap = np.full((n, length), -1)
        gap[row, place] = binned(place - (2 * pair + 1))
        return Examples(
            inputs, targets, unordered(keys * self.vocab_size + values, used), {"pairs": n_pairs, "gap": gap}
        )

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The token after the first occurrence of each key."""
        return after_first(inputs, self.vocab_size)
