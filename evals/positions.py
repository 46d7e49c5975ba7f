"""Loss by token position: does a mixer use what lies far back? Mean at each position, the mean of all so far, and the
difference to a reference run with an interval from paired sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from evals.carried import long_dataset, scored
from evals.suite import Parts, Result, Subject, suite
from evals.targets import at_step, check_folder
from models.config import at_least, one_of


@dataclass
class PositionsConfig:
    """See `conf/suite/positions.yaml`."""

    split: str = "test"
    length: int | None = None
    sequences: int = 64
    per_octave: int = 2
    reference: str | None = field(default=None, metadata={"folder": True})

    def check(self, path: str) -> None:
        one_of(f"{path}.split", self.split, ("val", "test"))
        at_least(f"{path}.length", self.length, 2, "null takes the training length")
        at_least(f"{path}.sequences", self.sequences, 1)
        at_least(f"{path}.per_octave", self.per_octave, 1)
        if self.reference is not None:
            at_least(f"{path}.sequences", self.sequences, 2, "an interval of the difference needs two")
            check_folder(f"{path}.reference", Path(self.reference))


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


def paired(own: Sequence[float | None], other: Sequence[float | None]) -> dict[str, Any]:
    """Mean of the differences of pairs with its 95 % interval, Student's t over the ``n`` pairs that both have; None where
    fewer than two do."""
    gaps = np.array([a - b for a, b in zip(own, other, strict=True) if a is not None and b is not None])
    n = len(gaps)
    if n < 2:
        return {"mean": float(gaps[0]) if n else None, "low": None, "high": None, "n": n}
    mean, half = float(gaps.mean()), float(stdtrit(n - 1, 0.975)) * float(gaps.std(ddof=1)) / math.sqrt(n)
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n}


@suite("positions", PositionsConfig)
def evaluate(subject: Subject, config: PositionsConfig, parts: Parts) -> Result:
    """Tables: ``<mode>`` with ``edges``, ``mean``, ``so_far``, ``sequences`` (each sequence's own means, for paired
    comparisons with another run on the same text) and ``each`` (its mean over all positions). With a reference
    ``difference``, of the deployed modes: ``mean``, ``low``, ``high`` and ``n`` by range, and ``overall``."""
    length = config.length or subject.dataset.seq_len
    result = Result()
    longest = subject.config.mixer.max_len()
    if longest is not None and longest < length:
        result.metrics["loss"] = None
        result.reasons["loss"] = f"mixer {subject.config.mixer.kind} takes at most {longest} tokens, not {length}"
        return result
    for mode in subject.model.modes:
        found = parts(mode, lambda mode=mode: _measured(subject, config, mode))  # type: ignore[misc]
        result.tables[mode] = found
        if mode == subject.model.modes[0]:
            result.record["positions"] = {"edges": found["edges"], "mean": found["mean"]}
        key = "loss" if mode == subject.model.modes[0] else f"{mode}/loss"
        result.metrics[key] = found["loss"]
    if config.reference is not None:
        own = result.tables[subject.model.modes[0]]
        table = parts("difference", lambda: _difference(subject, config, own))
        result.tables["difference"] = table
        result.metrics["difference"] = table["overall"]["mean"]
    return result


def _measured(subject: Subject, config: PositionsConfig, mode: str) -> dict[str, Any]:
    length = config.length or subject.dataset.seq_len
    edges = edges_of(length, config.per_octave)
    dataset = _dataset(subject, config)
    nats_NT, graded_NT = scored(subject, dataset, config.split, config.sequences, mode, subject.dataset.seq_len)
    weight = np.add.reduceat(graded_NT.sum(0).astype(float), edges[:-1])
    total = np.add.reduceat(np.where(graded_NT, nats_NT, 0.0).sum(0), edges[:-1])
    return {
        "edges": edges,
        "mean": (total / weight).tolist(),
        "so_far": (np.cumsum(total) / np.cumsum(weight)).tolist(),
        "sequences": [list(map(_plain, row)) for row in means(nats_NT, graded_NT, edges)],
        "each": [_plain(row[0]) for row in means(nats_NT, graded_NT, [0, length])],
        "loss": float(total.sum() / weight.sum()),
    }


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _dataset(subject: Subject, config: PositionsConfig) -> Any:
    length = config.length or subject.dataset.seq_len
    return subject.dataset if length == subject.dataset.seq_len else long_dataset(subject, length)


def _difference(subject: Subject, config: PositionsConfig, own: dict[str, Any]) -> dict[str, Any]:
    """This run minus the reference at the same step, sequence by sequence. Raises ValueError where the two did not read
    the same text."""
    assert config.reference is not None
    key = "suite.positions.reference"
    other = at_step(key, Path(config.reference), subject)
    mine, theirs = (_dataset(one, config).fingerprint for one in (subject, other))
    if mine != theirs:
        raise ValueError(
            f"{key}={config.reference}: {subject.name} reads data {mine} and {other.name} reads data {theirs}; both must "
            "read the same text, with the same tokenizer, in windows of the same length"
        )
    found = evaluate(other, replace(config, reference=None), Parts(None))
    if found.reasons:
        raise ValueError(f"{key}={config.reference}: {found.reasons['loss']}")
    table = found.tables[other.model.modes[0]]
    pairs = [paired(a, b) for a, b in zip(zip(*own["sequences"], strict=True), zip(*table["sequences"], strict=True), strict=True)]  # fmt: skip
    return {
        "reference": other.name,
        "edges": own["edges"],
        **{name: [pair[name] for pair in pairs] for name in ("mean", "low", "high", "n")},
        "overall": paired(own["each"], table["each"]),
    }
