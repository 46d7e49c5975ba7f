"""Loss beyond the training length, by carried state in bounded memory: 1x, 2x, ... 16x."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evals.carried import long_dataset, scored
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
    training length of each. A mixer whose length is bound has None there, and the reason."""
    result, trained = Result(), subject.dataset.seq_len
    longest = subject.config.mixer.max_len()
    for factor in config.factors:
        length = factor * trained
        for mode in subject.model.modes:
            prefix = "" if mode == subject.model.modes[0] else f"{mode}/"
            names = f"{prefix}loss/length={length}", f"{prefix}last/length={length}"
            if longest is not None and longest < length:
                for name in names:
                    result.metrics[name] = None
                    result.reasons[name] = f"mixer {subject.config.mixer.kind} takes at most {longest} tokens"
                continue

            def compute(length: int = length, mode: str = mode) -> list[float] | str:
                try:
                    dataset = subject.dataset if length == trained else long_dataset(subject, length)
                    nats_NT, graded_NT = scored(
                        subject, dataset, config.split, max(1, config.tokens // length), mode, trained
                    )
                except ValueError as error:
                    return str(error)
                sums = np.where(graded_NT, nats_NT, 0.0)
                last = slice(length - trained, None)
                return [float(sums.sum() / graded_NT.sum()), float(sums[:, last].sum() / graded_NT[:, last].sum())]

            found = parts(f"{length}/{mode}", compute)
            for i, name in enumerate(names):
                result.metrics[name] = None if isinstance(found, str) else found[i]
                if isinstance(found, str):
                    result.reasons[name] = found
    return result
