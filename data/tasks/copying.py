"""Three copies, from the one that a single convolution tap solves to the one that needs the content.

A copy at a fixed lag is one tap of a shift-invariant filter and says nothing of recall by content; that is why the
other two stand beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from data.tasks import register
from data.tasks.base import IGNORED, Examples, TaskConfig, harmonic, require
from data.tasks.draw import binned, bins, distinct


@register
@dataclass
class CopyFixedConfig(TaskConfig):
    """``lag`` random tokens, and from there on always the token of ``lag`` positions before; the next token.

    The copy task of the Toeplitz mixer's paper (1,024 tokens, lag 512), with uniform tokens in place of text. Chance: one
    in the number of tokens. Solved by a filter with the single tap at lag - 1, or by attention to a relative position.
    Slices: ``place``, how many tokens have been copied (see ``binned``).
    """

    kind: str = "copy_fixed"
    lag: int = 32
    n_tokens: int = 32

    lows: ClassVar[dict[str, int]] = {"n_tokens": 2}

    def check(self, path: str) -> None:
        super().check(path)
        self.require_length(path, self.lag + 1, f"more than {path}.lag")

    @property
    def vocab_size(self) -> int:
        return self.n_tokens

    @property
    def n_graded(self) -> int | None:
        return self.seq_len - self.lag

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"place": bins(self.seq_len - self.lag)}

    def chance(self) -> float:
        return 1 / self.n_tokens

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        source = rng.integers(self.n_tokens, size=(n, self.lag))
        inputs = source[:, np.arange(self.seq_len) % self.lag]
        targets = np.full(inputs.shape, IGNORED)
        targets[:, self.lag - 1 : -1] = inputs[:, self.lag :]
        place = binned(np.arange(self.seq_len) - (self.lag - 1))
        return Examples(inputs, targets, source, {"place": np.tile(place, (n, 1))})

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The token ``lag - 1`` positions back."""
        return np.roll(inputs, self.lag - 1, axis=1)


@register
@dataclass
class CopyOffsetConfig(TaskConfig):
    """filler, ``span`` different tokens, filler of any length up to ``max_gap``, the same tokens again, filler; the next
    token, from the second token of the copy on.

    Nothing announces the copy: it is known by its first token, and the offset must be found by content. Chance, for a
    model that knows which tokens are to be copied but not in which order: a guess among those that are left. Solved by
    an induction head. Slices: ``offset``, from a token to its copy.
    """

    kind: str = "copy_offset"
    span: int = 16
    max_gap: int = 32
    n_tokens: int = 32
    n_filler: int = 8

    lows: ClassVar[dict[str, int]] = {"span": 2, "max_gap": 0}

    def check(self, path: str) -> None:
        super().check(path)
        require(
            self.n_tokens >= self.span,
            f"{path}.n_tokens={self.n_tokens}: must be at least {self.span}, for {path}.span different tokens",
        )
        self.require_length(path, 2 * self.span + self.max_gap, f"for two times {path}.span and {path}.max_gap")

    @property
    def vocab_size(self) -> int:
        return self.n_tokens + self.n_filler

    @property
    def n_graded(self) -> int | None:
        return self.span - 1

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"offset": bins(self.span + self.max_gap)}

    def chance(self) -> float:
        return harmonic(self.span - 1) / (self.span - 1)

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        source = distinct(rng, n, self.n_tokens, self.span)
        gap = rng.integers(self.max_gap + 1, size=n)
        begin = rng.integers(self.seq_len - 2 * self.span - gap + 1)
        inputs = rng.integers(self.n_tokens, self.vocab_size, size=(n, self.seq_len))
        first = begin[:, None] + np.arange(self.span)
        second = first + (self.span + gap)[:, None]
        np.put_along_axis(inputs, first, source, axis=1)
        np.put_along_axis(inputs, second, source, axis=1)
        targets = np.full(inputs.shape, IGNORED)
        np.put_along_axis(targets, second[:, :-1], source[:, 1:], axis=1)
        return Examples(inputs, targets, source, {"offset": binned(self.span + gap)})

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The token after the first occurrence of each token."""
        return after_first(inputs, self.vocab_size)


@register
@dataclass
class CopySeparatorConfig(TaskConfig):
    """``min_span`` to ``max_span`` random tokens, a separator, the same tokens again, padding; the next token.

    As in Jelassi et al., "Repeat after me: Transformers are better than state space models at copying", 2024. Tokens
    may occur more than once, so an induction head on one token is not enough. Chance: one in the number of tokens.
    Solved by attention to the distance that the separator shows, or by longer matches. Slices: ``span``.
    """

    kind: str = "copy_separator"
    min_span: int = 8
    max_span: int = 31
    n_tokens: int = 32

    lows: ClassVar[dict[str, int]] = {"n_tokens": 2}

    def check(self, path: str) -> None:
        super().check(path)
        require(
            self.max_span >= self.min_span,
            f"{path}.max_span={self.max_span}: must be at least {path}.min_span={self.min_span}",
        )
        self.require_length(path, 2 * self.max_span + 1, f"for two times {path}.max_span and the separator")

    @property
    def vocab_size(self) -> int:
        """The tokens, the separator, padding."""
        return self.n_tokens + 2

    @property
    def n_graded(self) -> int | None:
        return self.max_span if self.max_span == self.min_span else None

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"span": bins(self.max_span)}

    def chance(self) -> float:
        return 1 / self.n_tokens

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        span = rng.integers(self.min_span, self.max_span + 1, size=(n, 1))
        source = rng.integers(self.n_tokens, size=(n, self.max_span))
        t = np.arange(self.seq_len)
        copied = t - span - 1  # which token of the source stands here a second time
        inside = (copied >= 0) & (copied < span)
        first = np.full((n, self.seq_len), self.n_tokens + 1)
        first[:, : self.max_span] = source
        inputs = np.where(t < span, first, np.where(t == span, self.n_tokens, self.n_tokens + 1))
        second = np.take_along_axis(source, np.clip(copied, 0, self.max_span - 1), axis=1)
        inputs = np.where(inside, second, inputs)
        targets = np.full(inputs.shape, IGNORED)
        targets[:, :-1] = np.where(inside[:, 1:], inputs[:, 1:], IGNORED)
        content = np.where(np.arange(self.max_span) < span, source, -1)
        return Examples(inputs, targets, content, {"span": binned(span[:, 0])})

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The token as many positions back as the source is long; that is where the separator stands."""
        span = np.argmax(inputs == self.n_tokens, axis=1)[:, None]
        return np.take_along_axis(inputs, np.maximum(np.arange(self.seq_len) - span, 0), axis=1)


def after_first(inputs: np.ndarray, vocab_size: int) -> np.ndarray:
    """(N, T) tokens -> (N, T): at each position, the token that stood after this position's token when that first came
    in its row; 0 where it has not come before."""
    n, length = inputs.shape
    first = np.zeros((n, vocab_size), dtype=np.int64)
    rows = np.arange(n)
    for t in range(length - 1, -1, -1):  # from the right, so that the first one is written last
        first[rows, inputs[:, t]] = t
    where = np.take_along_axis(first, inputs, axis=1)
    after = np.take_along_axis(inputs, np.minimum(where + 1, length - 1), axis=1)
    return np.where(where < np.arange(length), after, 0)
