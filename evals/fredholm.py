"""Fredholm index of each Toeplitz filter: what a layer's convolution loses for ever, in the limit of long sequences.

The index of a causal filter A(w) = sum_k f_k w^k is minus the number of its zeros inside the unit circle: 0 for a filter
with a stable inverse, -1 for a delay by one token. The index that training started from stands beside it, since a filter
that hardly moved shows its initialisation and nothing that was learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from evals.suite import Parts, Result, Subject, suite
from mixers.toeplitz import Toeplitz
from models.lm import LanguageModel, model_for


@dataclass
class FredholmConfig:
    """See `conf/suite/fredholm.yaml`."""

    near_zero: float = 1e-3

    def check(self, path: str) -> None:
        if not self.near_zero >= 0:
            raise ValueError(f"{path}.near_zero={self.near_zero}: must be at least 0")


def indices(model: LanguageModel) -> list[dict[str, Any]]:
    """One row for each filter: layer, operator, head, neighbour, index (None where it is not defined) and margin, the
    smallest |A| on the circle as a share of the largest."""
    rows = []
    for layer, block in enumerate(model.backbone.layers):
        if not isinstance(block.mixer, Toeplitz):
            continue
        for (operator, head, neighbour), (index, smallest) in block.mixer.fredholm_indices().items():
            taps_L = block.mixer.filter_OHJL[operator, head, neighbour].detach().double().cpu()
            largest = float(torch.fft.fft(taps_L, n=16 * len(taps_L)).abs().max())
            rows.append(
                {
                    "layer": layer,
                    "operator": operator,
                    "head": head,
                    "neighbour": neighbour,
                    "index": index,
                    "margin": smallest / largest if largest > 0 else 0.0,
                }
            )
    return rows


@suite("fredholm", FredholmConfig)
def evaluate(subject: Subject, config: FredholmConfig, parts: Parts) -> Result:
    """Metrics ``index/layer=<l>`` and ``initial_index/layer=<l>``: means over filters whose index is defined. Table
    ``filters``: every filter, with a warning where a zero lies so near the circle that the index says little."""
    result = Result()
    now, before = indices(subject.model), indices(model_for(subject.config, subject.dataset))
    if not now:
        result.metrics["index"] = None
        result.reasons["index"] = f"mixer {subject.config.mixer.kind} has no Toeplitz filters"
        return result
    for row, first in zip(now, before, strict=True):
        row["initial_index"], row["initial_margin"] = first["index"], first["margin"]
        row["near_zero"] = row["index"] is None or row["margin"] < config.near_zero
    result.tables["filters"] = now
    for layer in sorted({row["layer"] for row in now}):
        for name in ("index", "initial_index"):
            found = [row[name] for row in now if row["layer"] == layer and row[name] is not None]
            key = f"{name}/layer={layer}"
            result.metrics[key] = fmean(found) if found else None
            if not found:
                result.reasons[key] = "every filter of the layer has a zero on the unit circle"
    result.metrics["near_zero"] = fmean(row["near_zero"] for row in now)
    return result
