"""Selective copy: remember the data among the noise, in order.

Gu and Dao, "Mamba: Linear-time sequence modeling with selective state spaces", 2023, sections 3.1 and 4.1.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from data.tasks import register
from data.tasks.base import IGNORED, Examples, TaskConfig
from data.tasks.draw import binned, bins, distinct


@register
@dataclass
class SelectiveCopyConfig(TaskConfig):
    """``n_data`` tokens at random places among one noise token, then as many markers; at marker j a label: the j-th of
    the tokens.

    The answers are never shown. Chance: one in the number of tokens. Solved by a state that notes data and lets noise
    pass; a time-invariant filter cannot. Slices: ``gap``, from a token to its marker.
    """

    kind: str = "selective_copy"
    n_data: int = 8
    n_tokens: int = 16

    lows: ClassVar[dict[str, int]] = {"n_tokens": 2}

    def check(self, path: str) -> None:
        super().check(path)
        self.require_length(path, 2 * self.n_data + self._prompt, f"for two times {path}.n_data")

    _prompt: ClassVar[int] = 0  # tokens between noise and answers

    @property
    def vocab_size(self) -> int:
        """The tokens, noise, the marker."""
        return self.n_tokens + 2

    @property
    def n_graded(self) -> int | None:
        return self.n_data

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"gap": bins(self.seq_len)}

    def chance(self) -> float:
        return 1 / self.n_tokens

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        noise, tail = self.n_tokens, self.n_data + self._prompt
        source = rng.integers(self.n_tokens, size=(n, self.n_data))
        places = np.sort(distinct(rng, n, self.seq_len - tail, self.n_data), axis=1)
        inputs = np.full((n, self.seq_len), noise)
        np.put_along_axis(inputs, places, source, axis=1)
        inputs[:, -tail:] = self._tail()
        targets = np.full(inputs.shape, IGNORED)
        targets[:, -self.n_data :] = source
        gap = np.full(inputs.shape, -1)
        gap[:, -self.n_data :] = binned(np.arange(self.seq_len - self.n_data, self.seq_len) - places)
        return Examples(inputs, targets, source, {"gap": gap})

    def _tail(self) -> list[int]:
        """What stands after the noise: a marker for each answer."""
        return [self.n_tokens + 1] * self.n_data

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The j-th token that is neither noise nor marker."""
        out = np.zeros_like(inputs)
        order = np.argsort(inputs >= self.n_tokens, axis=1, kind="stable")[:, : self.n_data]
        out[:, -self.n_data :] = np.take_along_axis(inputs, order, axis=1)
        return out
