"""How documents become rows of T + 1 tokens: the first T of a row are read, the last T are asked for.

``bos`` and ``bos_reset``: the split is one line of tokens, cut every T; neighbouring rows share a token, and each token
but the very first is asked for once. ``best_fit`` (nanochat, Maglev): each row begins with BOS and is filled with whole
documents, the longest that fits first; when none fits, the shortest at hand is cropped to what is left, and the rest of
it is not used. ``rows`` (TMM): a document a row, cropped to T tokens, or padded. The last two ask in evaluation for what
they would ask for in training, and leave out what they crop.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from array import array
from bisect import bisect_right, insort
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

log = logging.getLogger(__name__)

BUFFER = 1000
"""Documents at hand while rows are filled, as in nanochat."""


class Rows(NamedTuple):
    """R rows. Tokens of padding are BOS."""

    tokens: np.ndarray
    """(R, T + 1) of the file's dtype."""

    document: np.ndarray
    """(R, T + 1) int64: each token's document in the split; -1 for padding."""


class Packing(Protocol):
    """The rows of one split."""

    n_train: int
    """Rows of an epoch: full ones, except where a packing pads."""

    n_eval: int
    """Rows of an evaluation."""

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """(R,) row numbers below ``n_train`` -> (R, T + 1) tokens, a copy."""

    def n_bos(self, rows: np.ndarray) -> int:
        """Positions of such rows that are not asked for (BOS, padding), without reading the tokens."""

    def evaluation(self, rows: np.ndarray) -> Rows:
        """(R,) row numbers below ``n_eval`` -> tokens and documents."""


class Windows:
    """``bos``, ``bos_reset``."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, seq_len: int, bos_id: int) -> None:
        self._tokens, self._starts, self._length, self._bos = tokens, starts, seq_len, bos_id
        self.n_train = max(0, (len(tokens) - 1) // seq_len)
        self.n_eval = max(0, -(-(len(tokens) - 1) // seq_len))
        # Row w of this view is window w; indexing it copies whole rows.
        size = tokens.itemsize
        shape, strides = (self.n_train, seq_len + 1), (seq_len * size, size)
        self._view = as_strided(tokens, shape, strides, writeable=False)

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        out: np.ndarray = self._view[rows]
        return out

    def n_bos(self, rows: np.ndarray) -> int:
        first = rows * self._length
        ends = np.searchsorted(self._starts, first + self._length, "right")
        return int((ends - np.searchsorted(self._starts, first, "right")).sum())

    def evaluation(self, rows: np.ndarray) -> Rows:
        positions = rows[:, None] * self._length + np.arange(self._length + 1)
        padding = positions >= len(self._tokens)
        tokens = np.where(padding, self._bos, self._tokens[np.minimum(positions, len(self._tokens) - 1)])
        document = np.searchsorted(self._starts, positions, "right") - 1
        document[padding] = -1
        return Rows(tokens, document)


class OneDocument:
    """``rows``."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, seq_len: int, bos_id: int) -> None:
        self._tokens, self._starts, self._length, self._bos = tokens, starts, seq_len, bos_id
        self.n_train = self.n_eval = len(starts)

    def _lengths(self, rows: np.ndarray) -> np.ndarray:
        """(R,) tokens of each row, BOS included."""
        after = np.minimum(rows + 1, len(self._starts) - 1)
        ends = np.where(rows + 1 < len(self._starts), self._starts[after], len(self._tokens))
        return np.minimum(ends - self._starts[rows], self._length + 1)

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        return self.evaluation(rows).tokens

    def n_bos(self, rows: np.ndarray) -> int:
        return int((self._length + 1 - self._lengths(rows)).sum())

    def evaluation(self, rows: np.ndarray) -> Rows:
        columns = np.arange(self._length + 1)
        padding = columns >= self._lengths(rows)[:, None]
        positions = np.minimum(self._starts[rows][:, None] + columns, len(self._tokens) - 1)
        tokens = np.where(padding, self._tokens.dtype.type(self._bos), self._tokens[positions])
        return Rows(tokens, np.where(padding, -1, rows[:, None]))


class BestFit:
    """``best_fit``. Which documents share a row is worked out once and kept beside the tokens: reading row r takes the
    same time wherever it is."""

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, seq_len: int, bos_id: int, folder: Path, split: str
    ) -> None:
        """``folder`` is where the plan is kept. Raises OSError if it cannot be written there."""
        self._tokens, self._length, self._bos = tokens, seq_len, bos_id
        plan = folder / f"best_fit-{seq_len}-{split}"
        if not plan.exists():
            log.info("packing %d documents of the %s split into rows of %d tokens", len(starts), split, seq_len + 1)
            made = best_fit(np.diff(np.append(starts, len(tokens))), seq_len + 1)
            cropped = 1 - int(made[1].sum()) / max(1, len(tokens))
            log.info("%.1f %% of the %s split's tokens are cropped from the ends of documents", 100 * cropped, split)
            _keep(plan, dict(zip(("documents", "taken", "first"), made, strict=True)))
        self._documents, self._taken, self._first = (
            np.load(plan / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in ("documents", "taken", "first")
        )
        self._starts = starts
        self.n_eval = len(self._first) - 1
        full = self.n_eval and int(self._taken[self._first[-2] :].sum()) == seq_len + 1
        self.n_train = self.n_eval if full else self.n_eval - 1 if self.n_eval else 0

    def _pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the pieces of these rows, in order, and how many each row has."""
        counts = self._first[rows + 1] - self._first[rows]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self._first[rows], counts) + within, counts

    def _positions(self, pieces: np.ndarray) -> np.ndarray:
        """Places in the file of all tokens of these pieces."""
        taken = self._taken[pieces]
        ends = np.cumsum(taken)
        shift = self._starts[self._documents[pieces]] - (ends - taken)
        return np.arange(int(ends[-1])) + np.repeat(shift, taken)

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        pieces, _ = self._pieces(rows)
        out: np.ndarray = self._tokens[self._positions(pieces)].reshape(len(rows), self._length + 1)
        return out

    def n_bos(self, rows: np.ndarray) -> int:
        return int((self._first[rows + 1] - self._first[rows] - 1).sum())

    def evaluation(self, rows: np.ndarray) -> Rows:
        pieces, _ = self._pieces(rows)
        size = len(rows) * (self._length + 1)
        tokens = np.full(size, self._bos, dtype=self._tokens.dtype)
        document = np.full(size, -1, dtype=np.int64)
        positions = self._positions(pieces)
        tokens[: len(positions)] = self._tokens[positions]  # only the split's last row can be short
        document[: len(positions)] = np.repeat(self._documents[pieces], self._taken[pieces])
        return Rows(tokens.reshape(len(rows), -1), document.reshape(len(rows), -1))


def _keep(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Puts arrays into a new folder, at once or not at all; another process may be doing the same."""
    folder.parent.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, values in arrays.items():
            np.save(work / f"{name}.npy", values)
        work.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
        try:
            work.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def best_fit(lengths: np.ndarray, size: int, buffer: int = BUFFER) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fills rows of ``size`` tokens from documents of ``lengths`` (BOS included) as nanochat's loader does.

    Returns pieces, row by row: (P,) int64 documents, (P,) int32 tokens taken from the start of each, and (rows + 1,)
    int64 first pieces of rows. The last row may be short. Where several documents are as long, the earliest is taken.
    """
    documents, taken, first = array("q"), array("i"), array("q", [0])
    held: list[tuple[int, int]] = []  # (length, -document), sorted: of equal lengths the earliest document is last
    place, n = 0, len(lengths)
    left = size
    while place < n or held:
        while len(held) < buffer and place < n:
            insort(held, (int(lengths[place]), -place))
            place += 1
        at = bisect_right(held, (left, 1)) - 1
        if at < 0:  # none fits
            at = bisect_right(held, (held[0][0], 1)) - 1
        length, document = held.pop(at)
        documents.append(-document)
        taken.append(min(length, left))
        left -= taken[-1]
        if not left:
            first.append(len(documents))
            left = size
    if left < size:
        first.append(len(documents))
    return np.array(documents, dtype=np.int64), np.array(taken, dtype=np.int32), np.array(first, dtype=np.int64)
