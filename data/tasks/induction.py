"""Induction: what followed this token when it came before?

The pattern of Olsson et al., "In-context learning and induction heads", 2022, and of the induction task of Fu et al.,
"Hungry hungry hippos", 2023, table 1. There one special token asks; here any token may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from data.tasks import register
from data.tasks.base import IGNORED, Examples, TaskConfig, require
from data.tasks.copying import after_first
from data.tasks.draw import binned, bins, distinct, occurrences


@register
@dataclass
class InductionConfig(TaskConfig):
    """Different tokens in random order, then ``pairs`` pairs of neighbours from among them, each ``repeats`` times: a b as
    before; the next token, b.

    Keys, values and filler are of one kind: only its repetition makes a token a query. The pairs share no token, so
    what followed a is always b. Chance: one in the number of tokens before the first query. Solved by an induction head:
    two layers of attention, or one with a short convolution. Slices: ``gap``, from the latest b to the query.
    """

    kind: str = "induction"
    seq_len: int = 60
    pairs: int = 4
    repeats: int = 6
    n_tokens: int = 12

    lows: ClassVar[dict[str, int]] = {"n_tokens": 2}

    def check(self, path: str) -> None:
        super().check(path)
        self.require_length(
            path, 2 * self.pairs * (1 + self.repeats), f"for {path}.pairs and {path}.repeats of all of them"
        )
        require(
            self.n_tokens >= self._context,
            f"{path}.n_tokens={self.n_tokens}: must be at least {self._context}, so that no token comes twice before "
            "the queries",
        )

    @property
    def _context(self) -> int:
        return self.seq_len - 2 * self.n_graded

    @property
    def vocab_size(self) -> int:
        return self.n_tokens

    @property
    def n_graded(self) -> int:
        return self.pairs * self.repeats

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"gap": bins(self.seq_len)}

    def chance(self) -> float:
        return 1 / self._context

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        length, pairs = self._context, self.pairs
        context = distinct(rng, n, self.n_tokens, length)
        # Pairs that do not touch: choose among length - pairs places, then move the j-th by j.
        places = np.sort(distinct(rng, n, length - pairs, pairs), axis=1) + np.arange(pairs)
        places = rng.permuted(np.tile(places, self.repeats), axis=1)
        asked = np.take_along_axis(context, places, axis=1)
        answers = np.take_along_axis(context, places + 1, axis=1)
        inputs = np.concatenate([context, np.stack([asked, answers], axis=2).reshape(n, -1)], axis=1)
        targets = np.full(inputs.shape, IGNORED)
        targets[:, length::2] = answers
        _, previous = occurrences(places)
        latest = np.where(previous >= 0, length + 2 * previous, places) + 1
        gap = np.full(inputs.shape, -1)
        gap[:, length::2] = binned(np.arange(length, self.seq_len, 2) - latest)
        return Examples(inputs, targets, context, {"gap": gap})

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The token after the first occurrence of each token."""
        return after_first(inputs, self.vocab_size)
