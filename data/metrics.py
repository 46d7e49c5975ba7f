"""Adding up an evaluation: nats per token, perplexity, bits per byte and accuracy, in total and per document."""

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


class TextScore:
    """The ``data.dataset.Score`` of text, in float64.

    Attributes: ``nats``, ``tokens``, ``bytes``, ``correct`` (totals over graded targets) and ``document_nats``,
    ``document_bytes`` ((n_documents,) float64 and int64). Documents that were not reached keep 0 bytes.
    """

    def __init__(
        self, n_documents: int, token_bytes: np.ndarray, domains: tuple[list[str], np.ndarray] | None = None
    ) -> None:
        """``token_bytes`` (vocab_size,): bytes that each token stands for, ``Tokenizer.token_bytes``. ``domains``: names,
        and the number of each document's, (n_documents,)."""
        self.token_bytes, self.domains = token_bytes, domains
        self.tokens = self.correct = 0
        self.document_nats = np.zeros(n_documents)
        self.document_bytes = np.zeros(n_documents, dtype=np.int64)

    def add(self, batch: Any, nats_BT: Any, correct_BT: Any, variation_BT: Any = None) -> None:
        """Positions whose target is -100 are left out, whatever stands there."""
        targets = _array(batch.targets_BT)
        graded = targets != -100
        targets, document = targets[graded], _array(batch.document_BT)[graded]
        np.add.at(self.document_nats, document, _array(nats_BT)[graded].astype(np.float64))
        np.add.at(self.document_bytes, document, self.token_bytes[targets])
        self.tokens += len(targets)
        self.correct += int(_array(correct_BT)[graded].sum())

    def metrics(self) -> dict[str, float]:
        """``loss`` (nats per token), ``perplexity``, ``bits_per_byte`` and ``accuracy`` (share of tokens guessed); where the
        corpus names domains, ``bits_per_byte/domain=<name>`` for each that was read."""
        out = {
            "loss": self.nats_per_token,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "accuracy": self.correct / self.tokens,
        }
        names, of_document = self.domains or ([], np.empty(0))
        for number, name in enumerate(names):
            mine = of_document == number
            if n_bytes := int(self.document_bytes[mine].sum()):
                out[f"bits_per_byte/domain={name}"] = bits_per_byte(float(self.document_nats[mine].sum()), n_bytes)
        return out

    @property
    def graded(self) -> int:
        return self.tokens

    def documents(self) -> dict[str, np.ndarray]:
        """``nats`` and ``bytes``."""
        return {"nats": self.document_nats, "bytes": self.document_bytes}

    def totals(self) -> np.ndarray:
        return np.concatenate([[self.tokens, self.correct], self.document_nats, self.document_bytes]).astype(np.float64)

    def set_totals(self, totals: np.ndarray) -> None:
        n = len(self.document_nats)
        self.tokens, self.correct = int(totals[0]), int(totals[1])
        self.document_nats, self.document_bytes = totals[2 : n + 2].copy(), totals[n + 2 :].astype(np.int64)

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
