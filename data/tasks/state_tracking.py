"""State tracking: the running product of group elements.

Parity is solvable with one bit of state and a sign; S3 needs a non-commutative state; S5 is not solvable, so that no
fixed number of layers of attention or of diagonal linear recurrence can track it at any length (Merrill, Petty and
Sabharwal, "The illusion of state in state-space models", 2024; Liu et al., "Transformers learn shortcuts to automata",
2023). Negative eigenvalues decide for linear recurrences: Grazzi et al., "Unlocking state-tracking in linear RNNs
through negative eigenvalues", 2024.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from data.tasks import register
from data.tasks.base import Examples, TaskConfig, require
from data.tasks.draw import binned, bins

MOVES = ("all", "swaps")


class Group(NamedTuple):
    """Permutations of ``points`` things: S_2 (parity), S_3, S_5. Element 0 is the identity."""

    elements: np.ndarray  # (G, points): element g takes i to elements[g, i]
    table: np.ndarray  # (G, G): table[state, move] = the element "state first, then move"
    swaps: np.ndarray  # the elements that exchange two things


def symmetric_group(points: int) -> Group:
    """All permutations, in lexicographic order."""
    elements = np.array(list(itertools.permutations(range(points))))
    number = {tuple(element): i for i, element in enumerate(elements.tolist())}
    after = elements[:, elements].transpose(1, 2, 0)  # [state, i, move] -> move(state(i))
    table = np.array([[number[tuple(product)] for product in row.T.tolist()] for row in after])
    swaps = np.flatnonzero((elements != np.arange(points)).sum(axis=1) == 2)
    return Group(elements, table, swaps)


@register
@dataclass
class ParityConfig(TaskConfig):
    """Random bits; at each position a label: is the number of ones so far odd?

    Chance: 1/2. Solved by one flipping bit of state; by attention only up to the lengths it was trained on. Slices:
    ``length``, bits read. Whole strings are kept apart between splits; short prefixes are not, and cannot be: there are
    only 2^t of them.
    """

    kind: str = "parity"
    seq_len: int = 40

    points: ClassVar[int] = 2

    @cached_property
    def _group(self) -> Group:
        return symmetric_group(self.points)

    @property
    def _moves(self) -> np.ndarray:
        """The elements that come as inputs."""
        return np.arange(len(self._group.elements))

    @property
    def vocab_size(self) -> int:
        """Tokens are elements, as inputs and as labels."""
        return len(self._group.elements)

    @property
    def n_graded(self) -> int | None:
        return self.seq_len

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"length": bins(self.seq_len)}

    def chance(self) -> float:
        """Always the likeliest state of each position."""
        moves, table = self._moves, self._group.table
        state = np.zeros(len(table))
        state[0] = 1
        best = 0.0
        for _ in range(self.seq_len):
            after = np.zeros_like(state)
            np.add.at(after, table[:, moves], state[:, None] / len(moves))
            state = after
            best += state.max() / self.seq_len
        return best

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        moves = self._moves
        inputs = moves[rng.integers(len(moves), size=(n, self.seq_len))]
        length = np.tile(binned(np.arange(1, self.seq_len + 1)), (n, 1))
        return Examples(inputs, self._track(inputs), inputs, {"length": length})

    def _track(self, inputs: np.ndarray) -> np.ndarray:
        """(N, T) elements -> (N, T) products of the first 1 ... T."""
        size, flat = len(self._group.table), self._group.table.ravel()
        states = np.empty(inputs.shape[::-1], dtype=np.int64)
        state = np.zeros(len(inputs), dtype=np.int64)
        for t, move in enumerate(np.ascontiguousarray(inputs.T)):
            states[t] = state = flat[state * size + move]
        return np.ascontiguousarray(states.T)

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """Applies each permutation to an arrangement of things and looks up what came out: no group table."""
        elements = self._group.elements
        weights = len(elements[0]) ** np.arange(len(elements[0]))
        codes = elements @ weights
        order = np.argsort(codes)
        arrangement = np.tile(np.arange(elements.shape[1]), (len(inputs), 1))
        out = np.empty_like(inputs)
        for t in range(inputs.shape[1]):
            arrangement = np.take_along_axis(elements[inputs[:, t]], arrangement, axis=1)
            out[:, t] = order[np.searchsorted(codes[order], arrangement @ weights)]
        return out


@register
@dataclass
class S3Config(ParityConfig):
    """Random permutations of three things; at each position a label: their product so far, as one of six tokens.

    Chance: 1/6 with all moves. Solved by any recurrence whose transitions do not commute. Slices: ``length``.
    """

    kind: str = "s3"

    moves: str = "all"
    """Which elements come as inputs: ``all``, or ``swaps``, the exchanges of two things, which generate the others."""

    points: ClassVar[int] = 3

    def check(self, path: str) -> None:
        super().check(path)
        require(self.moves in MOVES, f"{path}.moves={self.moves}: must be one of {', '.join(MOVES)}")

    @property
    def _moves(self) -> np.ndarray:
        return self._group.swaps if self.moves == "swaps" else np.arange(len(self._group.elements))


@register
@dataclass
class S5Config(S3Config):
    """Random permutations of five things; at each position a label: their product so far, as one of 120 tokens.

    Chance: 1/120 with all moves. Solved by a recurrence whose transitions reach every permutation (a product of several
    Householder steps, or a nonlinear one); at fixed depth not by attention. Slices: ``length``.
    """

    kind: str = "s5"

    points: ClassVar[int] = 5
