"""Scores of tasks: loss and accuracy on graded positions, per slice and per example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from data.dataset import IGNORED, Batch


class TaskScore:
    """Adds up an evaluation in float64, batch by batch, in any order, by one process or several.

    Attributes: ``document_nats``, ``document_correct``, ``document_graded``, each (n_examples,) float64: sums over the
    graded positions of each example, from which paired comparisons by example are made. Examples that were not reached
    have 0 graded positions.
    """

    def __init__(self, n_examples: int, slice_values: dict[str, list[int]]) -> None:
        """``slice_values``: the labels that each slice may have, ``TaskConfig.slice_values``."""
        self.slice_values = slice_values
        self._documents = np.zeros((3, n_examples))
        self._slices = {name: np.zeros((3, len(values))) for name, values in slice_values.items()}

    @property
    def document_nats(self) -> np.ndarray:
        return self._documents[0]

    @property
    def document_correct(self) -> np.ndarray:
        return self._documents[1]

    @property
    def document_graded(self) -> np.ndarray:
        return self._documents[2]

    @property
    def graded(self) -> int:
        return int(self.document_graded.sum())

    def add(self, batch: Batch, nats_BT: Any, correct_BT: Any, variation_BT: Any = None) -> None:
        """Adds an evaluation batch: -log p of each target in nats, and whether the likeliest token is right (see
        ``data.dataset.right``). Tensors or arrays, on any device; what they hold where nothing is graded is not read.

        Raises ValueError for a label that its slice does not list.
        """
        graded = _array(batch.targets_BT) != IGNORED
        self._add(batch, graded, _array(nats_BT)[graded], _array(correct_BT)[graded])

    def _add(self, batch: Batch, graded: np.ndarray, *values: np.ndarray) -> None:
        """Adds two numbers for each graded position."""
        document = _array(batch.document_BT)[graded]
        parts = [*(part.astype(np.float64) for part in values), np.ones(len(document))]
        for total, part in zip(self._documents, parts, strict=True):
            np.add.at(total, document, part)
        for name, labels in _labels(batch, graded):
            place, inside = self._places(name, labels)
            for total, part in zip(self._slices[name], parts, strict=True):
                np.add.at(total, place, part[inside])

    def _places(self, name: str, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Labels of graded positions -> where in the slice's totals those that are in a slice count, and which they
        are."""
        values = np.asarray(self.slice_values[name])
        inside = labels != -1
        place = np.searchsorted(values, labels[inside]).clip(max=len(values) - 1)
        if (strange := values[place] != labels[inside]).any():
            raise ValueError(f"slice {name}: has no label {labels[inside][strange][0]}, only {values.tolist()}")
        return place, inside

    def metrics(self) -> dict[str, float]:
        """``loss`` (nats per graded target), ``accuracy`` (share of graded targets that are right), ``accuracy_all``
        (share of examples that are right throughout), and ``accuracy/<slice>=<label>`` where there is one.

        Raises ValueError if nothing was scored.
        """
        nats, correct, graded = self._documents
        total = self._total()
        out = {
            "loss": nats.sum() / total,
            "accuracy": correct.sum() / total,
            "accuracy_all": (correct == graded)[graded > 0].mean(),
        }
        for label, (_, right_here, graded_here) in self._by_slice():
            out[f"accuracy/{label}"] = right_here / graded_here
        return {name: float(value) for name, value in out.items()}

    def _total(self) -> int:
        if not (total := self.graded):
            raise ValueError("nothing was scored")
        return total

    def _by_slice(self) -> Iterator[tuple[str, np.ndarray]]:
        """``<slice>=<label>`` and its three sums, where anything was graded."""
        for name, values in self.slice_values.items():
            for value, sums in zip(values, self._slices[name].T, strict=True):
                if sums[-1]:
                    yield f"{name}={value}", sums

    def documents(self) -> dict[str, np.ndarray]:
        """``nats``, ``correct`` and ``graded`` of each example."""
        return {"nats": self.document_nats, "correct": self.document_correct, "graded": self.document_graded}

    def totals(self) -> np.ndarray:
        """All sums as one float64 vector: those of several processes may be added."""
        return np.concatenate([part.ravel() for part in self._parts()])

    def set_totals(self, totals: np.ndarray) -> None:
        """Takes the sums that ``totals`` gave. Raises ValueError for another length."""
        parts = self._parts()
        if len(totals) != sum(part.size for part in parts):
            raise ValueError(f"{len(totals)} totals for a score of {sum(part.size for part in parts)}")
        start = 0
        for part in parts:
            part[...] = totals[start : start + part.size].reshape(part.shape)
            start += part.size

    def _parts(self) -> list[np.ndarray]:
        """The arrays that hold the sums."""
        return [self._documents, *self._slices.values()]


class AutomatonScore(TaskScore):
    """Of a task whose right answers are all those that may follow (RegBench): accuracy counts any of them, ``tvd`` is the
    mean total variation distance from the true distribution, and ``excess`` the loss above its entropy: an estimate of the
    divergence (KL) from it."""

    def __init__(self, n_examples: int, slice_values: dict[str, list[int]]) -> None:
        super().__init__(n_examples, slice_values)
        self._entropy, self._variation = np.zeros(1), np.zeros(1)

    def add(self, batch: Batch, nats_BT: Any, correct_BT: Any, variation_BT: Any = None) -> None:
        super().add(batch, nats_BT, correct_BT)
        graded = _array(batch.targets_BT) != IGNORED
        answers = _array(batch.answers_BT)[graded]
        self._entropy += np.log(np.bitwise_count(answers).astype(np.float64)).sum()
        self._variation += _array(variation_BT)[graded].astype(np.float64).sum()

    def metrics(self) -> dict[str, float]:
        metrics = super().metrics()
        total = self._total()
        excess = metrics["loss"] - float(self._entropy[0]) / total
        return metrics | {"tvd": float(self._variation[0]) / total, "excess": excess}

    def _parts(self) -> list[np.ndarray]:
        return [*super()._parts(), self._entropy, self._variation]


class RegressionScore(TaskScore):
    """Of a continuous task: squared errors in place of nats, and those of the best predictor in place of what is right."""

    def __init__(
        self, n_examples: int, slice_values: dict[str, list[int]], oracle: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """``oracle``: (N, T, F) inputs -> (N, T) predictions."""
        super().__init__(n_examples, slice_values)
        self.oracle = oracle

    def add(self, batch: Batch, nats_BT: Any, correct_BT: Any, variation_BT: Any = None) -> None:
        """``nats_BT``: squared errors, where the target is not NaN. ``correct_BT`` is not read."""
        targets = _array(batch.targets_BT)
        graded = ~np.isnan(targets)
        best = (self.oracle(_array(batch.inputs_BT)) - targets)[graded] ** 2
        self._add(batch, graded, _array(nats_BT)[graded], best)

    def metrics(self) -> dict[str, float]:
        """Means over graded positions: ``loss``, the squared error; ``bayes``, that of the best predictor; ``excess``,
        their difference, also as ``excess/<slice>=<label>``, and so ``loss``. Raises ValueError if nothing was
        scored."""
        total = self._total()
        loss, bayes = float(self.document_nats.sum()) / total, float(self.document_correct.sum()) / total
        out = {"loss": loss, "bayes": bayes, "excess": loss - bayes}
        for label, (errors, best, graded) in self._by_slice():
            out[f"loss/{label}"] = float(errors / graded)
            out[f"excess/{label}"] = float((errors - best) / graded)
        return out

    def documents(self) -> dict[str, np.ndarray]:
        """``nats`` (squared errors), ``bayes`` (those of the best predictor) and ``graded`` of each example."""
        return {"nats": self.document_nats, "bayes": self.document_correct, "graded": self.document_graded}


def _labels(batch: Batch, graded: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Each slice's labels at the graded positions."""
    found = []
    for name, labels in (batch.slices or {}).items():
        array = _array(labels)
        array = array[:, None] if array.ndim == 1 else array
        found.append((name, np.broadcast_to(array, graded.shape)[graded]))
    return found


def _array(values: Any) -> np.ndarray:
    """Tensor or array -> array; bfloat16, which numpy lacks, as float64."""
    if isinstance(values, Tensor):
        values = values.detach()
        values = (values.double() if values.is_floating_point() else values).numpy(force=True)
    return np.asarray(values)
