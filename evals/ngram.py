"""The yardstick: a byte-level 5-gram, in bits per byte on exactly the bytes that models are graded on.

Interpolated Kneser-Ney with three discounts per order (Chen and Goodman 1998, section 3; "modified Kneser-Ney"), 4
bytes of context. It counts as much of the train split as the models read. It knows nothing of tokenizers: the figure
is the same for bytes and BPE. A mixer that does not beat it has learned less than counting does. No torch, so that
reports stay quick.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.config import BytesConfig, CorpusConfig
from data.metrics import bits_per_byte
from data.prepare import MANIFEST, prepare

ORDER = 5
BOUNDARY = 256
"""Stands for everything before a document, so that no context crosses into the one before. Never predicted."""

BASE = 257
MAX_TRAIN_BYTES = 2**25
"""Counts are kept in memory: of a larger corpus only so many bytes are counted (32 MiB), and the report says so."""

VERSION = 2
"""Raise it whenever the same text would give other figures: cached ones are then not found."""


def ngram_keys(tokens: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """The n-grams that end in each byte of a stream of documents, each led by BOUNDARY.

    Returns (n,) int64 keys, one for each byte (not for BOUNDARY), and (n,) positions in ``tokens``. Base-257 digits:
    the last is the byte, the one before it the symbol before, so ``key % BASE**m`` is the shorter m-gram's key and
    ``key // BASE`` the context's.
    """
    tokens = np.asarray(tokens).astype(np.int64)
    starts = np.flatnonzero(tokens == BOUNDARY)
    if not len(tokens) or not len(starts) or starts[0] != 0:
        raise ValueError("the stream must begin with a document boundary")
    offset = np.arange(len(tokens)) - np.repeat(starts, np.diff(np.append(starts, len(tokens))))
    keys = tokens.copy()
    for lag in range(1, order):
        before = np.full(len(tokens), BOUNDARY, dtype=np.int64)
        before[lag:] = tokens[:-lag]
        before[offset < lag] = BOUNDARY
        keys += before * BASE**lag
    graded = np.flatnonzero(offset > 0)
    return keys[graded], graded


@dataclass(frozen=True)
class _Order:
    """Counts of one order: n-grams and contexts as sorted keys."""

    keys: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    weights: np.ndarray  # of the next shorter order, by context
    discounts: np.ndarray  # (4,) by min(count, 3)


class NGram:
    """P(byte | 4 bytes before), summing to 1 over the 256 bytes in every context, seen or not."""

    def __init__(self, tokens: np.ndarray, order: int = ORDER):
        """``tokens`` (n,): bytes, each document led by BOUNDARY. Raises ValueError if there is no byte."""
        keys, _ = ngram_keys(tokens, order)
        if not len(keys):
            raise ValueError("an n-gram model needs at least one byte of text")
        self.order = order
        keys, raw = np.unique(keys, return_counts=True)
        orders = [_counted(keys, raw)]
        for length in range(order - 1, 0, -1):
            # The shorter model is asked only where the longer one knows little, so it counts in how many different
            # contexts an n-gram appears. At a document's start there is but one context: there it counts how often.
            keys, which = np.unique(keys % BASE**length, return_inverse=True)
            raw = np.bincount(which, weights=raw).astype(np.int64)
            at_start = keys // BASE ** (length - 1) == BOUNDARY
            orders.append(_counted(keys, np.where(at_start, raw, np.bincount(which))))
        self._orders = orders[::-1]

    def probabilities(self, keys: np.ndarray) -> np.ndarray:
        """(n,) n-grams as `ngram_keys` makes them -> (n,) float64 probability of the last byte given the rest."""
        p = np.full(len(keys), 1 / 256)
        for length, level in enumerate(self._orders, start=1):
            key = keys % BASE**length
            known, context = _find(level.contexts, key // BASE)
            seen, ngram = _find(level.keys, key)
            count = np.where(seen, level.counts[ngram], 0)
            own = (count - level.discounts[np.minimum(count, 3)]) / level.totals[context]
            p = np.where(known, own + level.weights[context] * p, p)
        return p

    def nats(self, tokens: np.ndarray) -> np.ndarray:
        """-log p of every symbol of a stream; 0 for BOUNDARY."""
        out = np.zeros(len(tokens))
        keys, positions = ngram_keys(tokens, self.order)
        for begin in range(0, len(keys), 2**20):
            part = slice(begin, begin + 2**20)
            out[positions[part]] = -np.log(self.probabilities(keys[part]))
        return out


def _counted(keys: np.ndarray, counts: np.ndarray) -> _Order:
    contexts, first = np.unique(keys // BASE, return_index=True)
    totals = np.add.reduceat(counts, first)
    discounts = _discounts(counts)
    left_over = np.add.reduceat(discounts[np.minimum(counts, 3)], first)
    return _Order(keys, counts, contexts, totals, left_over / totals, discounts)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Chen and Goodman 1998, equation 26: what to take off counts of 1, 2, and 3 or more.

    Where counts of counts are too few for it, as among single bytes, half a count is taken: any value in (0, 1] gives
    proper probabilities.
    """
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == k)) for k in (1, 2, 3, 4))
    out = np.array([0.0, 0.5, 0.5, 0.5])
    if min(n1, n2, n3) > 0:
        y = n1 / (n1 + 2 * n2)
        estimate = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
        for k, value in enumerate(estimate, start=1):
            if 0 < value <= k:
                out[k] = value
    return out


def _find(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each key is in a sorted table: (found, index); the index of a key that is not there is any valid one."""
    index = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return table[index] == keys, index


@dataclass(frozen=True)
class Yardstick:
    """The 5-gram's loss on each byte of the test split."""

    byte_nats: np.ndarray  # (n,) float32, documents one after the other, without boundaries
    document_bytes: np.ndarray  # (n_documents,) int64
    train_bytes: int  # that were counted
    order: int = ORDER

    def document_nats(self, graded_bytes: np.ndarray) -> np.ndarray:
        """(n_documents,) nats over the first ``graded_bytes`` of each document: an evaluation reads from the front.

        Raises ValueError if these cannot be bytes of this test split.
        """
        graded = np.asarray(graded_bytes)
        if graded.shape != self.document_bytes.shape or (graded > self.document_bytes).any():
            raise ValueError("the graded bytes are not those of this test split")
        summed = np.concatenate([[0.0], np.cumsum(self.byte_nats, dtype=np.float64)])
        starts = np.concatenate([[0], np.cumsum(self.document_bytes)[:-1]])
        return summed[starts + graded] - summed[starts]

    def bits_per_byte(self, graded_bytes: np.ndarray | None = None) -> float:
        """Over the graded bytes; over the whole test split by default."""
        graded = self.document_bytes if graded_bytes is None else np.asarray(graded_bytes)
        return bits_per_byte(float(self.document_nats(graded).sum()), int(graded.sum()))


def yardstick(
    data_cfg: CorpusConfig, cache: Path, *, share: float = 1.0, max_train_bytes: int = MAX_TRAIN_BYTES
) -> Yardstick:
    """The yardstick of a corpus, cached under ``cache`` by its texts, its split fractions and what was counted.

    ``share`` of the train split's bytes are counted, above 1 all of them, but ``max_train_bytes`` at most: models that
    have read half of a text are held to what counting learns from half of it. Trained and scored on the byte
    tokenizer's token files, which are the documents' bytes in the order of every split. Raises what
    ``data.prepare.prepare`` raises, and ValueError if ``share`` is not above 0.
    """
    if not share > 0:
        raise ValueError(f"share={share}: must be above 0")
    folder = prepare(data_cfg, BytesConfig(), cache)
    size = (folder / "train.bin").stat().st_size
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    dtype = np.dtype(manifest["dtype"])
    wanted = max(2, min(max_train_bytes, round(min(share, 1.0) * size / dtype.itemsize)))
    file = cache / f"ngram{ORDER}-v{VERSION}-{wanted}-{max_train_bytes}-{folder.name}.npz"
    if not file.exists():
        if manifest["bos_id"] != BOUNDARY:
            raise ValueError(f"{folder}: BOS is {manifest['bos_id']}, the yardstick expects {BOUNDARY}")
        train = _part(np.fromfile(folder / "train.bin", dtype=dtype, count=max_train_bytes), wanted)
        test = np.fromfile(folder / "test.bin", dtype=dtype)
        nats = NGram(train).nats(test)
        starts = np.flatnonzero(test == BOUNDARY)
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp.npz")
        np.savez(
            temporary,
            byte_nats=nats[test != BOUNDARY].astype(np.float32),
            document_bytes=np.diff(np.append(starts, len(test))) - 1,
            train_bytes=np.count_nonzero(train != BOUNDARY),
        )
        os.replace(temporary, file)
    with np.load(file) as found:
        return Yardstick(found["byte_nats"], found["document_bytes"], int(found["train_bytes"]))


def _part(tokens: np.ndarray, wanted: int) -> np.ndarray:
    """``wanted`` symbols of a stream: whole documents in random order, the last one cut. A model reads windows from all over
    the text, so the first half of a book would not do."""
    if wanted >= len(tokens):
        return tokens
    starts = np.flatnonzero(tokens == BOUNDARY)
    sizes = np.diff(np.append(starts, len(tokens)))
    order = np.random.default_rng(0).permutation(len(starts))
    enough = int(np.searchsorted(np.cumsum(sizes[order]), wanted)) + 1
    return np.concatenate([tokens[starts[i] : starts[i] + sizes[i]] for i in order[:enough]])[:wanted]
