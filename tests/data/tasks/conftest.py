from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from data.tasks import configs
from data.tasks.base import Examples

# Task spaces so small that drawing a few thousand examples meets most of them several times.
TINY: dict[str, dict[str, Any]] = {
    "copy_fixed": {"lag": 3, "n_tokens": 4, "seq_len": 6},
    "copy_offset": {"span": 2, "max_gap": 1, "n_tokens": 8, "n_filler": 1, "seq_len": 6},
    "copy_separator": {"min_span": 1, "max_span": 3, "n_tokens": 4, "seq_len": 8},
    "delayed_recall": {"facts": 1, "n_keys": 6, "n_values": 6, "n_filler": 1, "min_gap": 2, "seq_len": 6},
    "induction": {"pairs": 1, "repeats": 1, "n_tokens": 5, "seq_len": 6},
    "mad_compression": {"n_tokens": 4, "seq_len": 4},
    "mad_fuzzy_recall": {"n_tokens": 9, "key_len": 1, "value_len": 2, "seq_len": 7},
    "mad_memorization": {"n_tokens": 9, "seq_len": 6},
    "mad_noisy_recall": {"n_tokens": 8, "n_noise": 1, "seq_len": 6},
    "mad_recall": {"n_tokens": 8, "seq_len": 6},
    "mad_selective_copy": {"n_data": 2, "n_tokens": 8, "seq_len": 8},
    "mqar": {"pairs": [1, 2], "n_keys": 4, "n_values": 4, "n_filler": 1, "asks": 1, "seq_len": 8},
    "parity": {"seq_len": 7},
    "s3": {"seq_len": 3},
    "s5": {"seq_len": 4, "moves": "swaps"},
    "selective_copy": {"n_data": 2, "n_tokens": 8, "seq_len": 6},
}

KINDS = list(configs())


@pytest.fixture(params=KINDS)
def cfg(request: pytest.FixtureRequest) -> Any:
    """Each task with its defaults, but few examples."""
    made = configs()[request.param](eval_examples=150, train_examples=None)
    made.check("data")
    return made


def drawn(cfg: Any, n: int, seed: int = 0) -> Examples:
    return cfg.sample(np.random.default_rng(seed), n)


def graded(cfg: Any, targets: np.ndarray) -> np.ndarray:
    return ~np.isnan(targets) if cfg.continuous else targets != -100


def measure(cfg: Any, predictions: np.ndarray, examples: Examples) -> float:
    """Accuracy on graded positions; of a continuous task the mean squared error."""
    where = graded(cfg, examples.targets)
    found, wanted = predictions[where], examples.targets[where]
    if cfg.continuous:
        return float(np.mean((found - wanted) ** 2))
    if examples.answers is not None:
        return float(np.mean((examples.answers[where] >> found) & 1))
    return float(np.mean(found == wanted))


def same(one: Examples, other: Examples) -> bool:
    """Equal in all parts; NaN equals NaN."""
    pairs = [(one.inputs, other.inputs), (one.targets, other.targets), (one.content, other.content)]
    pairs += [(one.slices[name], other.slices[name]) for name in one.slices]
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)
