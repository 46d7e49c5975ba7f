"""RegBench: learn a regular language in context.

Akyürek, Wang, Kim and Andreas, "In-context language learning: architectures and algorithms", 2024, section 3 and
appendix A: random probabilistic automata, several strings of each, uniform over the edges that leave a state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from data.tasks import register
from data.tasks.base import IGNORED, Examples, TaskConfig, require
from data.tasks.draw import GOLDEN, binned, bins, mix

if TYPE_CHECKING:
    from data.tasks.score import TaskScore


@register
@dataclass
class RegbenchConfig(TaskConfig):
    """| string | string | ... of one random automaton, from its start state each; the next token, where it is no
    separator.

    Right is every token that the automaton allows (the paper's accuracy); the loss can fall to the entropy of its edges,
    and ``excess`` is what lies above. The row is filled with strings and cut at its end, where the paper has 10 to 20
    strings. Chance, for a model that knows the alphabet: edges per state over letters. Solved, to a few per cent, by
    n-gram heads: attention to what followed the same last tokens. No automaton is in two splits, nor are two automata
    of one language. Slices: ``position`` in the row.
    """

    kind: str = "regbench"
    seq_len: int = 256
    min_states: int = 4
    max_states: int = 12
    max_edges: int = 3
    min_symbols: int = 4
    n_symbols: int = 18
    max_string: int = 49

    lows: ClassVar[dict[str, int]] = {"min_states": 2}

    def check(self, path: str) -> None:
        super().check(path)
        require(
            self.max_states >= self.min_states,
            f"{path}.max_states={self.max_states}: must be at least {path}.min_states={self.min_states}",
        )
        require(
            self.n_symbols >= self.min_symbols,
            f"{path}.n_symbols={self.n_symbols}: must be at least {path}.min_symbols={self.min_symbols}",
        )
        most = min(self.min_states - 1, self.min_symbols, 6)
        require(
            self.max_edges <= most,
            f"{path}.max_edges={self.max_edges}: must be at most {most}, as edges lead to different other states and "
            "bear different letters",
        )
        require(self.n_symbols <= 62, f"{path}.n_symbols={self.n_symbols}: must be at most 62")

    @property
    def vocab_size(self) -> int:
        """The letters and the separator."""
        return self.n_symbols + 1

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"position": bins(self.seq_len)}

    def chance(self) -> float:
        sizes = range(self.min_symbols, self.n_symbols + 1)
        return (1 + self.max_edges) / 2 * sum(1 / size for size in sizes) / len(sizes)

    def automata(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Letters (n, S, E) and targets (n, S, E) of the edges that leave each state, and their number (n, S).

        States and letters of an automaton are fewer than the arrays hold: what is not in use is never reached. Edges of
        a state bear different letters and lead to different states, none of them itself.
        """
        states, edges, symbols = self.max_states, self.max_edges, self.n_symbols
        n_states = rng.integers(self.min_states, states + 1, size=n)
        n_letters = rng.integers(self.min_symbols, symbols + 1, size=n)
        # A random order of all letters makes the first so many of it the alphabet; likewise the edges' letters from it.
        alphabet = np.argsort(rng.random((n, symbols), dtype=np.float32), axis=1)
        lot = rng.random((n, states, symbols), dtype=np.float32)
        lot[np.broadcast_to(np.arange(symbols) >= n_letters[:, None, None], lot.shape)] = 2
        letters = np.take_along_axis(alphabet[:, None], np.argpartition(lot, edges - 1, axis=2)[:, :, :edges], axis=2)
        lot = rng.random((n, states, states), dtype=np.float32)
        lot[np.broadcast_to(np.arange(states) >= n_states[:, None, None], lot.shape)] = 2
        lot[:, np.arange(states), np.arange(states)] = 2
        targets = np.argpartition(lot, edges - 1, axis=2)[:, :, :edges]
        # What the partition leaves in front has an order of its own, and not all edges are kept.
        turn = rng.permuted(np.broadcast_to(np.arange(edges), targets.shape), axis=2)
        targets = np.take_along_axis(targets, turn, axis=2)
        return letters, targets, rng.integers(1, edges + 1, size=(n, states))

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        letters, targets, n_edges = self.automata(rng, n)
        states, length = self.max_states, self.seq_len
        # Each state's row of edges, repeated to a length that all numbers of edges divide: a uniform entry is a uniform
        # edge. States are numbered through all automata, so one lookup serves them all.
        cycle = math.lcm(*range(1, self.max_edges + 1))
        edge = np.arange(cycle) % n_edges[:, :, None]
        start = np.arange(n) * states
        symbol = np.take_along_axis(letters, edge, axis=2).ravel()
        target = (np.take_along_axis(targets, edge, axis=2) + start[:, None, None]).ravel()
        ends = self._ends(rng, n)
        dice = rng.integers(cycle, size=(length + 1, n))
        tokens, visited = np.empty((2, length + 1, n), dtype=np.int64)
        state = start
        for t in range(length + 1):
            visited[t] = state
            place = state * cycle + dice[t]
            tokens[t] = symbol[place]
            state = np.where(ends[t], start, target[place])
        tokens[ends] = self.n_symbols
        allowed = ((np.arange(self.max_edges) < n_edges[:, :, None]) * (np.int64(1) << letters)).sum(axis=2).ravel()
        tokens, visited = np.ascontiguousarray(tokens.T), visited.T
        answers = allowed[visited]
        graded = tokens[:, 1:] != self.n_symbols
        return Examples(
            tokens[:, :-1],
            np.where(graded, tokens[:, 1:], IGNORED),
            self._language(letters, targets, n_edges),
            {"position": np.tile(binned(np.arange(length)), (n, 1))},
            np.where(graded, answers[:, 1:], 0),
        )

    def _ends(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """(T + 1, n) bool: where separators stand: at the very beginning, and after strings of 1 ... max_string."""
        count = self.seq_len // 2 + 1
        steps = rng.integers(1, self.max_string + 1, size=(n, count)) + 1
        steps[:, 0] = 0
        where = np.cumsum(steps, axis=1)
        ends = np.zeros((self.seq_len + 1, n), dtype=bool)
        row, column = np.nonzero(where <= self.seq_len)
        ends[where[row, column], row] = True
        return ends

    def _language(self, letters: np.ndarray, targets: np.ndarray, n_edges: np.ndarray) -> np.ndarray:
        """(n, 1) int64 that is the same for automata with the same language, however their states are named and however
        many of them do the same.

        Each state gets a hash of the letters that may follow, then of letters and hashes of where they lead, and so on:
        the tree of all strings, to a depth at which any two automata of this size differ if they ever do.
        """
        n, states, edges = letters.shape
        exists = np.arange(edges) < n_edges[:, :, None]
        letter = (letters.astype(np.uint64) + np.uint64(1)) * GOLDEN
        names = np.zeros((n, states), dtype=np.uint64)
        flat = (targets + np.arange(n)[:, None, None] * states).ravel()
        for _ in range(2 * states):
            reached = names.ravel()[flat].reshape(letters.shape)
            names = mix((mix(reached + letter) * exists).sum(axis=2, dtype=np.uint64))
        return names[:, :1].astype(np.int64)

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The in-context n-gram model of the paper, with backoff: the token that last followed the longest run (up to 8)
        of the latest tokens that has come before."""
        n, length = inputs.shape
        out = np.zeros_like(inputs)
        backs = np.arange(length)[:, None] > np.arange(length)  # [now, before]
        suffix = np.ones((n, length, length), dtype=bool)
        for order in range(min(8, length)):
            token = np.full((n, length), -1)
            token[:, order:] = inputs[:, : length - order]
            suffix &= (token[:, :, None] == token[:, None, :]) & (token[:, :, None] >= 0)
            follower = np.append(inputs[:, 1:], np.zeros((n, 1), dtype=np.int64), axis=1)
            hit = suffix & backs & (follower < self.n_symbols)[:, None, :]
            last = length - 1 - np.argmax(hit[:, :, ::-1], axis=2)
            out = np.where(hit.any(axis=2), np.take_along_axis(follower, last, axis=1), out)
        return out

    def new_score(self, n_examples: int) -> TaskScore:
        from data.tasks.score import AutomatonScore

        return AutomatonScore(n_examples, self.slice_values)
