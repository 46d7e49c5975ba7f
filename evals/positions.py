"""Loss by token position: does a mixer use what lies far back? Mean at each position, and the mean of all so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evals.carried import long_dataset, scored
from evals.suite import Parts, Result, Subject, suite
from models.config import at_least, one_of


@dataclass
class PositionsConfig:
    """See `conf/suite/positions.yaml`."""

    split: str = "test"
    length: int | None = None
    sequences: int = 64
    per_octave: int = 2

    def check(self, path: str) -> None:
        one_of(f"{path}.split", self.split, ("val", "test"))
        at_least(f"{path}.length", self.length, 2, "null takes the training length")
        at_least(f"{path}.sequences", self.sequences, 1)
        at_least(f"{path}.per_octave", self.per_octave, 1)


def edges_of(length: int, per_octave: int) -> list[int]:
    """Log-spaced borders of ranges of positions, from 0: ``per_octave`` for each doubling, no range empty."""
    wanted = 2 ** (np.arange(0, np.log2(length) + 1e-9, 1 / per_octave))
    inner = sorted({round(x) for x in wanted if round(x) < length})
    return [0, *inner, length]


def means(nats_NT: np.ndarray, graded_NT: np.ndarray, edges: list[int]) -> np.ndarray:
    """(N, ranges): sum of nats and number of graded targets -> mean of each sequence in each range; NaN where none is."""
    total = np.add.reduceat(np.where(graded_NT, nats_NT, 0.0), edges[:-1], axis=1)
    count = np.add.reduceat(graded_NT.astype(float), edges[:-1], axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count


@suite("positions", PositionsConfig)
def evaluate(subject: Subject, config: PositionsConfig, parts: Parts) -> Result:
    """Tables: ``<mode>`` with ``edges``, ``mean``, ``so_far`` and ``sequences`` (each sequence's own means, for paired
    comparisons with another run on the same text)."""
    length = config.length or subject.dataset.seq_len
    result = Result()
    longest = subject.config.mixer.max_len()
    if longest is not None and longest < length:
        result.metrics["loss"] = None
        result.reasons["loss"] = f"mixer {subject.config.mixer.kind} takes at most {longest} tokens, not {length}"
        return result
    dataset = subject.dataset if length == subject.dataset.seq_len else long_dataset(subject, length)
    edges = edges_of(length, config.per_octave)
    for mode in subject.model.modes:

        def compute(mode: str = mode) -> dict:
            nats_NT, graded_NT = scored(subject, dataset, config.split, config.sequences, mode, subject.dataset.seq_len)
            own = means(nats_NT, graded_NT, edges)
            weight = np.add.reduceat(graded_NT.sum(0).astype(float), edges[:-1])
            total = np.add.reduceat(np.where(graded_NT, nats_NT, 0.0).sum(0), edges[:-1])
            return {
                "edges": edges,
                "mean": (total / weight).tolist(),
                "so_far": (np.cumsum(total) / np.cumsum(weight)).tolist(),
                "sequences": [[None if np.isnan(x) else float(x) for x in row] for row in own],
                "loss": float(total.sum() / weight.sum()),
            }

        found = parts(mode, compute)
        result.tables[mode] = found
        if mode == subject.model.modes[0]:
            result.record["positions"] = {"edges": edges, "mean": found["mean"]}
        key = "loss" if mode == subject.model.modes[0] else f"{mode}/loss"
        result.metrics[key] = found["loss"]
    return result
