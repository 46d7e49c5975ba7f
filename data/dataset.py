"""The one interface through which training and evaluation see data, whatever its kind."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from data.config import DATA
from data.tokenizers import Tokenizer

IGNORED = -100
"""A target that is not graded; also what torch's cross-entropy ignores by default."""


class Batch(NamedTuple):
    """Rows of a step's global batch, or of an evaluation. B rows, T positions."""

    inputs_BT: Tensor
    """int64 tokens. Of a continuous task (``Dataset.continuous``): (B, T, F) float32, F numbers at each position."""

    targets_BT: Tensor
    """int64, what must be predicted after each input: of text the next token, of a task the next token or a label; -100
    where it is not graded (BOS, padding). Of a continuous task: (B, T) float32, one number, NaN where not graded."""

    segment_ids_BT: Tensor | None
    """int64, the document of each input within its row: from 0, non-decreasing. None: documents see each other."""

    n_targets: int
    """Graded targets of the **whole** global batch, whichever rows are here: divide the summed loss by it, and neither
    micro batch nor world size matters. In evaluation: of this batch."""

    document_BT: Tensor | None
    """int64, evaluation only: the document of each target, counted over the split; -1 for padding. A task's documents
    are its examples, and what is not graded counts as padding."""

    answers_BT: Tensor | None = None
    """int64, evaluation only, of tasks where more than one token is right: bit v is set if token v may follow, all of
    them equally likely. None: only the target is right. See ``right``."""

    slices: dict[str, Tensor] | None = None
    """Evaluation only, of tasks: name -> (B,) or (B, T) int64 labels by which scores are cut; -1: in no slice. They stay
    on the CPU."""


def right(batch: Batch, predicted_BT: Tensor) -> Tensor:
    """(B, T) bool: is the predicted token right? Where more than one is (``answers_BT``), any of those that may follow.

    Means something at graded positions only. All three on one device, or ``predicted_BT`` alone elsewhere.
    """
    if batch.answers_BT is None:
        return predicted_BT == batch.targets_BT.to(predicted_BT.device)
    return (batch.answers_BT.to(predicted_BT.device) >> predicted_BT) & 1 == 1


def total_variation(probabilities_NV: Tensor, answers_N: Tensor) -> Tensor:
    """(N,) in [0, 1]: half the sum of absolute differences from the distribution that ``answers_BT`` describes. Means
    something where there is an answer."""
    tokens_V = torch.arange(probabilities_NV.shape[-1], device=answers_N.device)
    allowed_NV = ((answers_N[:, None] >> tokens_V) & 1).to(probabilities_NV.dtype)
    true_NV = allowed_NV / allowed_NV.sum(-1, keepdim=True).clamp(min=1)
    return (probabilities_NV - true_NV).abs().sum(-1) / 2


class Score(Protocol):
    """Adds up an evaluation, batch by batch, in any order; each kind of data set has its own."""

    @property
    def graded(self) -> int:
        """Targets that were scored so far."""

    def add(self, batch: Batch, nats_BT: Any, correct_BT: Any, variation_BT: Any = None) -> None:
        """A batch's -log p of each target in nats (of a continuous task: squared errors), whether the likeliest token is
        ``right`` (of a continuous task: not read) and, where the batch has ``answers_BT``, the ``total_variation``. What is not
        graded is left out, whatever stands there."""

    def metrics(self) -> dict[str, float]:
        """The figures by name, ``loss`` always among them. Raises ValueError if nothing was scored."""

    def documents(self) -> dict[str, np.ndarray]:
        """By name, one number for each document, for paired comparisons between runs."""

    def totals(self) -> np.ndarray:
        """All sums as one float64 vector: those of several processes may be added."""

    def set_totals(self, totals: np.ndarray) -> None:
        """Takes the sums that ``totals`` gave. Raises ValueError for another length."""


class Dataset(Protocol):
    """Can be pickled and forked; opens its files in each process anew."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None:
        """Marks the start of a document; None: there is no such token (tasks)."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Turns ids into text; None: they stand for none (tasks)."""

    @property
    def seq_len(self) -> int:
        """T of every batch."""

    @property
    def n_train_tokens(self) -> int | None:
        """Tokens of the train split, BOS included: what one epoch reads. None: the split has no end, no example comes
        twice, and there are no epochs."""

    @property
    def continuous(self) -> bool:
        """Inputs and targets are real numbers, the loss is their squared error."""

    @property
    def input_width(self) -> int | None:
        """F of a continuous task; None otherwise."""

    @property
    def readout(self) -> str:
        """``each``: the prediction at t is read from position t. ``last``: all predictions are decoded from the features
        at the last position alone, by a decoder that is told the position (MAD's compression)."""

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

    def n_documents(self, split: str) -> int: ...

    def document_bytes(self, split: str) -> np.ndarray:
        """(n_documents,) int64: bytes of UTF-8 text of each document, in the order of ``Batch.document_BT``; of a task
        zeros."""

    def new_score(self, split: str) -> Score:
        """An empty score for an evaluation of the split."""


OPENERS = {"corpus": "data.packed"}
"""kind of a ``data`` config -> the module whose ``open_dataset`` opens it; imported when used. Tasks: TASK_OPENER."""

TASK_OPENER = "data.tasks.dataset"


def open_dataset(data_cfg: Any, tokenizer_cfg: Any, *, global_batch: int, seed: int, cache: Path) -> Dataset:
    """Opens a data set, preparing it under ``cache`` if that has not been done.

    ``global_batch``: rows of an optimizer step, over all devices and micro batches. ``seed`` decides the order of
    training windows (of a task without a fixed train split, which examples there are) and nothing else. Raises ValueError with the full key for a bad config.
    """
    if data_cfg.kind not in DATA:
        raise ValueError(f"data.kind={data_cfg.kind}: must be one of {', '.join(DATA)}")
    data_cfg.check("data")
    tokenizer_cfg.check("tokenizer")
    if global_batch < 1:
        raise ValueError(f"global_batch={global_batch}: must be at least 1")
    opener = importlib.import_module(OPENERS.get(data_cfg.kind, TASK_OPENER))
    opened: Dataset = opener.open_dataset(
        data_cfg, tokenizer_cfg, global_batch=global_batch, seed=seed, cache=Path(cache)
    )
    return opened
