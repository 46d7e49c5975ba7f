"""MAD: selective copying, compression and memorization.

Poli et al., "Mechanistic design and scaling of hybrid architectures", 2024, section 3.1 and appendix B, with the baseline
and the axes of difficulty of the reference code, mad-lab.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from data.randomness import key
from data.tasks import register
from data.tasks.base import IGNORED, Examples, TaskConfig, require
from data.tasks.draw import binned, bins
from data.tasks.selective_copy import SelectiveCopyConfig


@register
@dataclass
class MadSelectiveCopyConfig(SelectiveCopyConfig):
    """Selective copy whose answers are asked for by one copy token and then blanks, which are the noise as well.

    In mad-lab the last data token always stands right before the copy token, and places come from an unseeded generator;
    here all places are alike. Chance, solution and slices as for selective_copy.
    """

    kind: str = "mad_selective_copy"
    seq_len: int = 256
    eval_examples: int = 1280
    train_examples: int | None = 12800
    n_data: int = 16
    n_tokens: int = 14

    _prompt: ClassVar[int] = 1

    def _tail(self) -> list[int]:
        return [self.n_tokens + 1] + [self.n_tokens] * self.n_data


@register
@dataclass
class MadCompressionConfig(TaskConfig):
    """Random tokens and a compression token; label: at each position its own token, decoded from the features of the last
    position alone.

    That is what ``readout = "last"`` asks of the model side: in MAD an MLP gets the last position's features plus an
    embedding of the position that is wanted. Read position by position the task would be trivial. Chance: one in the
    number of tokens. Solved by a vector that keeps the whole sequence apart. Slices: ``distance`` to the last position.
    """

    kind: str = "mad_compression"
    seq_len: int = 32
    eval_examples: int = 1280
    train_examples: int | None = 12800
    n_tokens: int = 15

    readout: ClassVar[str] = "last"
    lows: ClassVar[dict[str, int]] = {"n_tokens": 2}

    @property
    def vocab_size(self) -> int:
        """The tokens and the compression token."""
        return self.n_tokens + 1

    @property
    def n_graded(self) -> int | None:
        return self.seq_len - 1

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"distance": bins(self.seq_len)}

    def chance(self) -> float:
        return 1 / self.n_tokens

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        inputs = np.full((n, self.seq_len), self.n_tokens)
        inputs[:, :-1] = rng.integers(self.n_tokens, size=(n, self.seq_len - 1))
        targets = inputs.copy()
        targets[:, -1] = IGNORED
        distance = np.tile(binned(np.arange(self.seq_len)[::-1]), (n, 1))
        return Examples(inputs, targets, inputs[:, :-1], {"distance": distance})

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The input itself: it sees all positions, which the model's decoder does not."""
        return inputs


@register
@dataclass
class MadMemorizationConfig(TaskConfig):
    """k ? k ? k ? ...; at each ? a label: the value of the key before it, by a map that is the same in all examples.

    The values are never inputs: they must be learnt into the weights. Chance: one in the number of keys (each value
    belongs to one key). Solved by MLPs and embeddings; the mixer has only to look one position back. The splits share
    the facts, as they must, and no sequence of keys. No slices.
    """

    kind: str = "mad_memorization"
    seq_len: int = 32
    eval_examples: int = 1280
    train_examples: int | None = 256
    n_tokens: int = 256

    map_seed: int = 0
    """Of the map from keys to values. Not the run's seed: runs are compared on the same facts."""

    lows: ClassVar[dict[str, int]] = {"n_tokens": 5, "map_seed": 0}

    def check(self, path: str) -> None:
        super().check(path)
        require(self.seq_len % 2 == 0, f"{path}.seq_len={self.seq_len}: must be even, for whole pairs")

    @cached_property
    def _map(self) -> np.ndarray:
        """(keys,) the value of each key."""
        n_keys = (self.n_tokens - 1) // 2
        rng = np.random.default_rng(key("task", self.kind, "map", self.n_tokens, self.map_seed))
        return n_keys + rng.permutation(self.n_tokens - 1 - n_keys)[:n_keys]

    @property
    def vocab_size(self) -> int:
        return self.n_tokens

    @property
    def n_graded(self) -> int | None:
        return self.seq_len // 2

    def chance(self) -> float:
        return 1 / len(self._map)

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        keys = rng.integers(len(self._map), size=(n, self.seq_len // 2))
        inputs = np.full((n, self.seq_len), self.n_tokens - 1)
        inputs[:, ::2] = keys
        targets = np.full(inputs.shape, IGNORED)
        targets[:, 1::2] = self._map[keys]
        return Examples(inputs, targets, keys, {})

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """Knows the map, and looks one position back."""
        out = np.zeros_like(inputs)
        out[:, 1:] = self._map[np.minimum(inputs[:, :-1], len(self._map) - 1)]
        return out
