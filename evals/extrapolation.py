"""Loss beyond the training length, by carried state in bounded memory: 1x, 2x, ... 16x.

The last training length of a long sequence is other text than a short sequence has, so its loss alone says little. Where
the windows of the two lengths hold the same tokens, which packing=bos sees to, their losses are also subtracted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from data.dataset import IGNORED
from evals.carried import long_dataset, scored, sequences
from evals.positions import paired
from evals.suite import Parts, Result, Subject, suite
from models.config import at_least, one_of


@dataclass
class ExtrapolationConfig:
    """See `conf/suite/extrapolation.yaml`."""

    split: str = "test"
    factors: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    tokens: int = 65536

    def check(self, path: str) -> None:
        one_of(f"{path}.split", self.split, ("val", "test"))
        at_least(f"{path}.tokens", self.tokens, 1)
        if not self.factors or min(self.factors) < 1:
            raise ValueError(
                f"{path}.factors={self.factors}: must be whole multiples of the training length, from 1 on"
            )


@suite("extrapolation", ExtrapolationConfig)
def evaluate(subject: Subject, config: ExtrapolationConfig, parts: Parts) -> Result:
    """Metrics ``loss/length=<n>``: mean over all positions of sequences of that length; ``last/length=<n>``: over the last
    training length of each; ``gain/length=<n>``: that minus the loss of the same tokens in a sequence of one training
    length, below 0 where what lies further back helps. A mixer whose length is bound has None there, and the reason.
    Table ``gain``: ``<mode>/length=<n>`` with the 95 % interval over sequences."""
    result, trained = Result(), subject.dataset.seq_len
    longest = subject.config.mixer.max_len()
    for mode in subject.model.modes:
        prefix = "" if mode == subject.model.modes[0] else f"{mode}/"
        short = cache(partial(_windows, subject, config, trained, max(1, config.tokens // trained), mode))
        for factor in config.factors:
            length = factor * trained
            names = {kind: f"{prefix}{kind}/length={length}" for kind in ("loss", "last", "gain")}
            if longest is not None and longest < length:
                result.metrics |= dict.fromkeys(names.values())
                reason = f"mixer {subject.config.mixer.kind} takes at most {longest} tokens"
                result.reasons |= dict.fromkeys(names.values(), reason)
                continue
            found = parts(f"{length}/{mode}", lambda n=length, m=mode, s=short: _measured(subject, config, n, m, s))  # type: ignore[misc]
            if isinstance(found, str):
                result.metrics |= dict.fromkeys(names.values())
                result.reasons |= dict.fromkeys(names.values(), found)
                continue
            gain = found["gain"]
            result.metrics |= {names["loss"]: found["loss"], names["last"]: found["last"]}
            result.metrics[names["gain"]] = None if isinstance(gain, str) else gain["mean"]
            if isinstance(gain, str):
                result.reasons[names["gain"]] = gain
            else:
                result.tables.setdefault("gain", {})[f"{mode}/length={length}"] = gain
    return result


@dataclass
class _Windows:
    """The first ``count`` windows of one length, as they were scored."""

    nats_NT: np.ndarray
    targets_NT: np.ndarray  # -100 where nothing is graded


def _windows(subject: Subject, config: ExtrapolationConfig, length: int, count: int, mode: str) -> _Windows:
    trained = subject.dataset.seq_len
    dataset = subject.dataset if length == trained else long_dataset(subject, length)
    nats_NT, _ = scored(subject, dataset, config.split, count, mode, trained)
    batches = sequences(dataset, config.split, subject.batch, count)
    return _Windows(nats_NT, np.concatenate([batch.targets_BT.numpy() for batch in batches]))


def _measured(
    subject: Subject, config: ExtrapolationConfig, length: int, mode: str, short: Callable[[], _Windows]
) -> dict[str, Any] | str:
    """``loss``, ``last`` and ``gain`` (or why there is none); why there is nothing."""
    trained = subject.dataset.seq_len
    try:
        long = _windows(subject, config, length, max(1, config.tokens // length), mode)
    except ValueError as error:
        return str(error)
    graded_NT, last = long.targets_NT != IGNORED, slice(length - trained, None)
    out: dict[str, Any] = {
        "loss": float(long.nats_NT[graded_NT].mean()),
        "last": float(long.nats_NT[:, last][graded_NT[:, last]].mean()),
    }
    factor, count = length // trained, len(long.nats_NT)
    same = slice(factor - 1, factor * count, factor)
    if not np.array_equal(short().targets_NT[same], long.targets_NT[:, last]):
        packing = getattr(subject.config.data, "packing", None)
        return out | {"gain": f"packing={packing}: windows of two lengths do not hold the same tokens"}
    gaps = np.where(graded_NT[:, last], long.nats_NT[:, last] - short().nats_NT[same], 0.0).sum(1)
    return out | {"gain": paired((gaps / graded_NT[:, last].sum(1)).tolist(), [0.0] * count)}
