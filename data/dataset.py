"""The one interface through which training and evaluation see data, whatever its kind."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from data.tokenizers import Tokenizer

IGNORED = -100
"""A target that is not graded; also what torch's cross-entropy ignores by default."""


class Batch(NamedTuple):
    """Rows of a step's global batch, or of an evaluation. B rows, T positions."""

    inputs_BT: Tensor
    """int64 tokens."""

    targets_BT: Tensor
    """int64, the token after each input; -100 where it is not graded (BOS, padding)."""

    segment_ids_BT: Tensor | None
    """int64, the document of each input within its row: from 0, non-decreasing. None: documents see each other."""

    n_targets: int
    """Graded targets of the **whole** global batch, whichever rows are here: divide the summed loss by it, and neither
    micro batch nor world size matters. In evaluation: of this batch."""

    document_BT: Tensor | None
    """int64, evaluation only: the document of each target, counted over the split; -1 for padding."""


class Score(Protocol):
    """Adds up an evaluation, batch by batch, in any order."""

    def add(self, batch: Batch, nats_BT: Any, correct_BT: Any) -> None:
        """-log p of each target, and whether it was the likeliest; tensors or arrays, on any device."""

    def metrics(self) -> dict[str, float]:
        """The figures by name. Raises ValueError if nothing was scored."""

    @property
    def graded(self) -> int:
        """Targets that were graded so far."""

    def documents(self) -> dict[str, np.ndarray]:
        """By name, one number for each document, for paired comparisons between runs."""

    def totals(self) -> np.ndarray:
        """All sums as one float64 vector: those of several processes may be added."""

    def set_totals(self, totals: np.ndarray) -> None:
        """Takes the sums that ``totals`` gave."""


class Dataset(Protocol):
    """Can be pickled and forked; opens its files in each process anew."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Turns ids into text."""

    @property
    def seq_len(self) -> int:
        """T of every batch."""

    @property
    def n_train_tokens(self) -> int:
        """Tokens of the train split, BOS included: what one epoch reads."""

    @property
    def fingerprint(self) -> str:
        """Of all that decides what is read: texts, tokenizer, split, packing and T; not of the order (seed)."""

    def train_batch(self, step: int, rows: slice | None = None) -> Batch:
        """Rows (default: all) of the global batch of a step: a pure function of (seed, step).

        Raises ValueError for a negative step and for rows that select nothing.
        """

    def eval_batches(self, split: str, batch_size: int, max_tokens: int | None = None) -> Iterator[Batch]:
        """The split in order, each token that is not BOS as a target exactly once; the last batch may have fewer rows.

        ``max_tokens`` stops after the first so many positions (rounded down to whole windows, at least one).
        Raises ValueError for an unknown split or a number below 1.
        """

    def new_score(self, split: str) -> Score:
        """An empty one for the split."""

    def n_documents(self, split: str) -> int: ...

    def document_bytes(self, split: str) -> np.ndarray:
        """(n_documents,) int64: bytes of UTF-8 text of each document, in the order of ``Batch.document_BT``."""


OPENERS = {"corpus": "data.packed"}
"""kind of a ``data`` config -> the module whose ``open_dataset`` opens it; imported when used."""


def open_dataset(data_cfg: Any, tokenizer_cfg: Any, *, global_batch: int, seed: int, cache: Path) -> Dataset:
    """Opens a data set, preparing it under ``cache`` if that has not been done.

    ``global_batch``: rows of an optimizer step, over all devices and micro batches. ``seed`` decides the order of
    training windows and nothing else. Raises ValueError with the full key for a bad config.
    """
    if data_cfg.kind not in OPENERS:
        raise ValueError(f"data.kind={data_cfg.kind}: must be one of {', '.join(OPENERS)}")
    data_cfg.check("data")
    tokenizer_cfg.check("tokenizer")
    if global_batch < 1:
        raise ValueError(f"global_batch={global_batch}: must be at least 1")
    opener = importlib.import_module(OPENERS[data_cfg.kind])
    opened: Dataset = opener.open_dataset(
        data_cfg, tokenizer_cfg, global_batch=global_batch, seed=seed, cache=Path(cache)
    )
    return opened
