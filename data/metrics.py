"""Nats per token, perplexity and bits per byte, in total and per document."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def bits_per_byte(nats: float, n_bytes: float) -> float:
    """A total loss in nats as bits per byte of UTF-8 text: the one figure that tokenizers share.

    Raises ValueError unless n_bytes > 0.
    """
    if not n_bytes > 0:
        raise ValueError(f"bits per byte of {n_bytes} bytes")
    return nats / (math.log(2) * n_bytes)


class Score:
    """Adds up an evaluation in float64, batch by batch, in any order.

    Attributes: ``nats``, ``tokens``, ``bytes`` (totals over graded targets) and ``document_nats``, ``document_bytes``
    ((n_documents,) float64 and int64), from which paired comparisons by document are made. Documents that were not
    reached keep 0 bytes.
    """

    def __init__(self, n_documents: int, token_bytes: np.ndarray) -> None:
        """``token_bytes`` (vocab_size,): bytes that each token stands for, ``Tokenizer.token_bytes``."""
        self.token_bytes = token_bytes
        self.tokens = 0
        self.document_nats = np.zeros(n_documents)
        self.document_bytes = np.zeros(n_documents, dtype=np.int64)

    def add(self, nats_BT: Any, targets_BT: Any, document_BT: Any) -> None:
        """Adds -log p of each target. All three are (B,T) tensors or arrays of any float or integer type, on any
        device.

        Positions whose target is -100 are left out, whatever their nats are.
        """
        targets = _array(targets_BT)
        graded = targets != -100
        targets, document = targets[graded], _array(document_BT)[graded]
        np.add.at(self.document_nats, document, _array(nats_BT)[graded].astype(np.float64))
        np.add.at(self.document_bytes, document, self.token_bytes[targets])
        self.tokens += len(targets)

    def merge(self, other: Score) -> None:
        """Adds what another process has scored of the same split."""
        self.tokens += other.tokens
        self.document_nats += other.document_nats
        self.document_bytes += other.document_bytes

    @property
    def nats(self) -> float:
        return float(self.document_nats.sum())

    @property
    def bytes(self) -> int:
        return int(self.document_bytes.sum())

    @property
    def nats_per_token(self) -> float:
        """Raises ValueError if nothing was scored."""
        if not self.tokens:
            raise ValueError("nothing was scored")
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats per token), infinite where that is beyond float64."""
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """Raises ValueError if nothing was scored."""
        return bits_per_byte(self.nats, self.bytes)


def _array(values: Any) -> np.ndarray:
    """Tensor or array -> array. Duck-typed: reports use this module without torch."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double().numpy() if values.is_floating_point() else values.numpy()
    return np.asarray(values)
