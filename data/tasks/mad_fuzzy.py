"""MAD: fuzzy in-context recall, where keys and values are several tokens long.

Poli et al., "Mechanistic design and scaling of hybrid architectures", 2024, section 3.1 and appendix B. mad-lab trains on
keys of every length and tests on the longest; here both have all lengths, and the slice ``key=<longest>`` is its test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from data.tasks import register
from data.tasks.base import IGNORED, Examples, TaskConfig, require
from data.tasks.draw import distinct, hash_rows, occurrences, unordered


@register
@dataclass
class MadFuzzyRecallConfig(TaskConfig):
    """padding, then keys of 1 ... ``key_len`` and values of 1 ... ``value_len`` different tokens; the next token, for all
    tokens of the value of a key that has come before.

    The first half of the tokens spell keys, the second values, the last pads on the left. Chance: one in the number of
    value tokens. Solved by recognising a key across its tokens, which a lookup by one token cannot. Slices: ``key``, the
    length of the key; ``token``, which token of the value, from 1.
    """

    kind: str = "mad_fuzzy_recall"
    seq_len: int = 128
    eval_examples: int = 1280
    train_examples: int | None = 12800
    n_tokens: int = 16
    key_len: int = 3
    value_len: int = 3

    lows: ClassVar[dict[str, int]] = {"n_tokens": 5}

    def check(self, path: str) -> None:
        super().check(path)
        for name, most in (("key_len", min(self._n_keys, 8)), ("value_len", min(self._n_values, 8))):
            value = getattr(self, name)
            require(
                value <= most, f"{path}.{name}={value}: must be at most {most} with {path}.n_tokens={self.n_tokens}"
            )
        require(
            (self._n_keys + 1) ** self.key_len * self.seq_len < 2**62,
            f"{path}.key_len={self.key_len}: makes too many keys with {path}.n_tokens={self.n_tokens}; take a smaller one",
        )
        self.require_length(path, 2 * (self.key_len + self.value_len), f"for two pairs of {path}.key_len and value_len")

    @property
    def _n_keys(self) -> int:
        return (self.n_tokens - 1) // 2

    @property
    def _n_values(self) -> int:
        return self.n_tokens - 1 - self._n_keys

    @property
    def _most_pairs(self) -> int:
        """Pairs to draw, so that they fill a row, by six standard deviations of their length. Keys that come again share their
        value's length: where there are few of them (key_len=1) some rows are not full."""
        mean = (self.key_len + self.value_len) / 2 + 1
        deviation = ((self.key_len**2 + self.value_len**2 - 2) / 12) ** 0.5
        return min(
            self.seq_len // 2, int(((3 * deviation + (9 * deviation**2 + mean * self.seq_len) ** 0.5) / mean) ** 2) + 1
        )

    @property
    def vocab_size(self) -> int:
        return self.n_tokens

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"key": list(range(1, self.key_len + 1)), "token": list(range(1, self.value_len + 1))}

    def chance(self) -> float:
        return 1 / self._n_values

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        most, width = self._most_pairs, self.key_len + self.value_len
        key_len = rng.integers(1, self.key_len + 1, size=(n, most))
        value_len = rng.integers(1, self.value_len + 1, size=(n, most))
        keys = distinct(rng, n * most, self._n_keys, self.key_len).reshape(n, most, -1)
        values = distinct(rng, n * most, self._n_values, self.value_len).reshape(n, most, -1) + self._n_keys
        ids = self._number(keys, key_len, self._n_keys)
        first, _ = occurrences(ids)  # a key's value is that of its first pair
        values = np.take_along_axis(values, first[:, :, None], axis=1)
        value_len = np.take_along_axis(value_len, first, axis=1)
        ends = np.cumsum(key_len + value_len, axis=1)
        # As many whole pairs as leave room for one more, which asks for one of them again.
        n_pairs = np.minimum(np.count_nonzero(ends <= self.seq_len - width, axis=1), most - 1)
        row = np.arange(n)
        asked = rng.integers(n_pairs)
        for part in (keys, values, key_len, value_len, first):
            part[row, n_pairs] = part[row, asked]
        pair = np.arange(most)
        used = pair <= n_pairs[:, None]
        size = key_len + value_len
        starts = np.cumsum(size, axis=1) - size
        pad = self.seq_len - (starts[row, n_pairs] + size[row, n_pairs])
        tokens, where, inside = self._laid_out(keys, values, key_len, value_len, starts + pad[:, None])
        inside &= used[:, :, None]
        inputs = np.full((n, self.seq_len), self.n_tokens - 1)
        example = np.broadcast_to(row[:, None, None], inside.shape)[inside]
        inputs[example, where[inside]] = tokens[inside]
        # Graded: from the last token of a known key to the last but one of its value.
        known = (first != pair) & used
        graded = inside.copy()
        graded[:, :, : self.key_len] = False
        graded &= known[:, :, None]
        example, place = np.broadcast_to(row[:, None, None], graded.shape)[graded], where[graded] - 1
        targets = np.full(inputs.shape, IGNORED)
        targets[example, place] = tokens[graded]
        slices = {name: np.full(inputs.shape, -1) for name in ("key", "token")}
        slices["key"][example, place] = np.broadcast_to(key_len[:, :, None], graded.shape)[graded]
        order = np.concatenate([np.zeros(self.key_len, np.int64), np.arange(1, self.value_len + 1)])
        slices["token"][example, place] = np.broadcast_to(order, graded.shape)[graded]
        facts = np.stack([ids, self._number(values - self._n_keys, value_len, self._n_values)], axis=2)
        facts = hash_rows(facts.reshape(-1, 2)).reshape(n, most).astype(np.int64)
        return Examples(inputs, targets, unordered(facts, (first == pair) & used), slices)

    @staticmethod
    def _number(tokens: np.ndarray, length: np.ndarray, base: int) -> np.ndarray:
        """(N, P, L) tokens, of which ``length`` count -> (N, P): a number of their own for each."""
        digits = np.where(np.arange(tokens.shape[2]) < length[:, :, None], tokens + 1, 0)
        return digits @ (base + 1) ** np.arange(tokens.shape[2])

    def _laid_out(
        self, keys: np.ndarray, values: np.ndarray, key_len: np.ndarray, value_len: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(N, P, key_len + value_len) each: tokens of each pair, where in the row they stand, and which of them exist."""
        in_key, in_value = np.arange(self.key_len), np.arange(self.value_len)
        where = np.concatenate(
            [starts[:, :, None] + in_key, (starts + key_len)[:, :, None] + in_value], axis=2, dtype=np.int64
        )
        exists = np.concatenate([in_key < key_len[:, :, None], in_value < value_len[:, :, None]], axis=2)
        return np.concatenate([keys, values], axis=2), where, exists

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """A dictionary from whole keys to whole values, filled while reading. Slow: one example at a time."""
        out = np.zeros_like(inputs)
        for row, tokens in enumerate(inputs.tolist()):
            known: dict[tuple[int, ...], list[int]] = {}
            key: tuple[int, ...] = ()
            value: list[int] = []
            for t, token in enumerate(tokens):
                if token < self._n_keys:  # a key begins or goes on
                    if value:
                        known.setdefault(key, value)
                        key, value = (), []
                    key += (token,)
                elif token < self.n_tokens - 1:
                    value = [*value, token]
                answer = known.get(key, [])
                if len(value) < len(answer):
                    out[row, t] = answer[len(value)]
        return out
