"""Delayed recall: a few facts, a long stretch of nothing, and only then the questions.

A stack of sliding windows still carries information over layers x (window - 1) tokens, so a task that needs memory must
place its facts further back than that; ``min_gap`` says how far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from data.tasks import register
from data.tasks.base import IGNORED, Examples, TaskConfig, require
from data.tasks.copying import after_first
from data.tasks.draw import binned, bins, distinct, unordered


@register
@dataclass
class DelayedRecallConfig(TaskConfig):
    """filler, ``facts`` key-value pairs, at least ``min_gap`` tokens of filler, each key once; there a label: its value.

    Answers are never shown. Chance, for a model that has the values but not whose they are: one in the number of facts;
    for one that cannot reach back, and so with a single fact: one in ``n_values``. With a single fact it comes to score 0:
    pairs of key and value are divided among the splits, so that in training a key never has the values of evaluation.
    Solved by attention without a window, or by a state that keeps the facts while nothing comes. Slices: ``gap``, from a
    value to the query for it.
    """

    kind: str = "delayed_recall"
    seq_len: int = 256
    facts: int = 2
    min_gap: int = 128
    n_keys: int = 16
    n_values: int = 16
    n_filler: int = 8

    lows: ClassVar[dict[str, int]] = {"n_values": 2}

    def check(self, path: str) -> None:
        super().check(path)
        for name in ("n_keys", "n_values"):
            value = getattr(self, name)
            require(value >= self.facts, f"{path}.{name}={value}: must be at least {path}.facts={self.facts}")
        self.require_length(
            path, 3 * self.facts + self.min_gap - 1, f"for {path}.facts, {path}.min_gap and the queries"
        )

    @property
    def vocab_size(self) -> int:
        return self.n_keys + self.n_values + self.n_filler

    @property
    def n_graded(self) -> int | None:
        return self.facts

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"gap": bins(self.seq_len)}

    def chance(self) -> float:
        return 1 / self.facts if self.facts > 1 else 1 / self.n_values

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        facts = self.facts
        keys = distinct(rng, n, self.n_keys, facts)
        values = self.n_keys + distinct(rng, n, self.n_values, facts)
        inputs = rng.integers(self.n_keys + self.n_values, self.vocab_size, size=(n, self.seq_len))
        # From the last value to the first query there are min_gap steps or more.
        first_query = self.seq_len - facts
        begin = rng.integers(first_query - self.min_gap - 2 * facts + 2, size=(n, 1))
        places = begin + 2 * np.arange(facts)
        np.put_along_axis(inputs, places, keys, axis=1)
        np.put_along_axis(inputs, places + 1, values, axis=1)
        order = distinct(rng, n, facts, facts)
        inputs[:, first_query:] = np.take_along_axis(keys, order, axis=1)
        targets = np.full(inputs.shape, IGNORED)
        targets[:, first_query:] = np.take_along_axis(values, order, axis=1)
        gap = np.full(inputs.shape, -1)
        asked = np.take_along_axis(places + 1, order, axis=1)
        gap[:, first_query:] = binned(np.arange(first_query, self.seq_len) - asked)
        return Examples(inputs, targets, unordered(keys * self.vocab_size + values), {"gap": gap})

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The token after the first occurrence of each key."""
        return after_first(inputs, self.vocab_size)
