"""MAD's axes of difficulty, as the files of the tasks list them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from data.tasks import configs
from tests.data.tasks.conftest import drawn, graded, measure
from tests.data.tasks.test_task_relations import CONF

AXIS = re.compile(r"^(\w+): *([\d.]+) *#.*\baxis: ([\d., ]*\d)", re.M)


def axes() -> list[tuple[str, str, float]]:
    """(task, field, value) for the baseline and each value that a comment in the task's file names. Not of
    train_examples: it decides how many examples there are, not what they are."""
    found = []
    for file in sorted(CONF.glob("mad_*.yaml")):
        for field, baseline, values in AXIS.findall(file.read_text()):
            if field != "train_examples":
                found += [(file.stem, field, float(value)) for value in [baseline, *values.split(",")]]
    return found


def test_the_axes_are_found() -> None:
    fields = {(kind, field) for kind, field, _ in axes()}
    assert fields == {
        ("mad_compression", "n_tokens"),
        ("mad_compression", "seq_len"),
        ("mad_fuzzy_recall", "n_tokens"),
        ("mad_fuzzy_recall", "seq_len"),
        ("mad_memorization", "n_tokens"),
        ("mad_noisy_recall", "n_tokens"),
        ("mad_noisy_recall", "noise_share"),
        ("mad_noisy_recall", "seq_len"),
        ("mad_recall", "n_tokens"),
        ("mad_recall", "seq_len"),
        ("mad_selective_copy", "n_data"),
        ("mad_selective_copy", "n_tokens"),
        ("mad_selective_copy", "seq_len"),
    }


@pytest.mark.parametrize(("kind", "field", "value"), axes())
def test_each_value_of_an_axis_is_solved(kind: str, field: str, value: float) -> None:
    schema = OmegaConf.structured(configs()[kind])
    number = value if field == "noise_share" else int(value)
    cfg: Any = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(CONF / f"{kind}.yaml"), {field: number}))
    cfg.check("data")
    examples = drawn(cfg, 200)
    where = graded(cfg, examples.targets)
    assert where.any(axis=1).all()
    assert measure(cfg, cfg.oracle(examples.inputs), examples) == 1
    assert examples.inputs.max() < cfg.vocab_size and examples.targets[where].max() < cfg.vocab_size
    for name, labels in examples.slices.items():
        broad = np.broadcast_to(labels[:, None] if labels.ndim == 1 else labels, where.shape)
        assert set(np.unique(broad[where])) <= set(cfg.slice_values[name]), name


@pytest.mark.parametrize("n_tokens", [16, 128])
@pytest.mark.parametrize(("key_len", "value_len"), [(3, 3), (1, 3), (1, 2)])
@pytest.mark.parametrize("seq_len", [512, 1024])
def test_fuzzy_rows_that_take_more_pairs_than_most_are_drawn(
    seq_len: int, key_len: int, value_len: int, n_tokens: int
) -> None:
    """How many pairs fill a row varies, most of all with few keys: their values' lengths recur. Thousands of rows meet
    the ends of that."""
    cfg = configs()["mad_fuzzy_recall"](seq_len=seq_len, key_len=key_len, value_len=value_len, n_tokens=n_tokens)
    cfg.check("data")
    padding = []
    for seed in range(16):
        examples = drawn(cfg, 250, seed)
        assert graded(cfg, examples.targets).any(axis=1).all()
        padding.append((examples.inputs == n_tokens - 1).sum(axis=1))
    ends = examples.take(np.argsort(padding[-1])[[0, 1, -2, -1]])  # the fullest rows and the emptiest
    assert measure(cfg, cfg.oracle(ends.inputs), ends) == 1
    if key_len == 3:  # MAD's own: rows are full
        assert (np.concatenate(padding) <= 2 * (key_len + value_len)).mean() > 0.99
