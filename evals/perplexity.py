"""Perplexity, nats and bits per byte of whole splits, by corpus and domain, in every mode of the model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from evals.suite import Parts, Result, Subject, suite
from models.config import at_least, one_of
from models.evaluate import by_mode, score
from runs.load import open_data


@dataclass
class PerplexityConfig:
    """See `conf/suite/perplexity.yaml`."""

    splits: list[str] = field(default_factory=lambda: ["test"])
    corpora: list[str] = field(default_factory=list)
    max_tokens: int | None = None

    def check(self, path: str) -> None:
        for split in self.splits:
            one_of(f"{path}.splits", split, ("train", "val", "test"))
        if not self.splits:
            raise ValueError(f"{path}.splits=[]: name at least one of train, val, test")
        at_least(f"{path}.max_tokens", self.max_tokens, 1, "null takes the whole split")


@suite("perplexity", PerplexityConfig)
def evaluate(subject: Subject, config: PerplexityConfig, parts: Parts) -> Result:
    """Keys: ``<corpus>/<split>/<metric>``, the run's own corpus without its name; per mode as in run.json."""
    result = Result()
    for corpus in [None, *config.corpora]:
        dataset = subject.dataset if corpus is None else open_corpus(subject, corpus)
        for split in config.splits:
            for mode in subject.model.modes:

                def compute(dataset: Any = dataset, split: str = split, mode: str = mode) -> dict[str, float]:
                    return score(
                        subject.model,
                        dataset,
                        split,
                        batch_size=subject.rows(mode),
                        precision=subject.config.precision,
                        max_tokens=config.max_tokens,
                        mode=mode,
                    ).metrics()

                found = parts(f"{corpus}/{split}/{mode}", compute)
                name = split if corpus is None else f"{corpus}/{split}"
                result.metrics |= by_mode(name, found, mode, subject.model.modes)
    return result


def open_corpus(subject: Subject, name: str) -> Any:
    """Another corpus of `conf/data/`, with the run's tokenizer and training length. Raises ValueError where it is not
    prepared with this tokenizer."""
    from runs.validate import data_config

    config = subject.config
    data = dataclasses.replace(data_config(name), seq_len=config.data.seq_len)
    return open_data(dataclasses.replace(config, data=data))
