"""Fredholm index of each Toeplitz filter: what a layer's convolution loses for ever, in the limit of long sequences.

The index of a causal filter A(w) = sum_k f_k w^k is minus the number of its zeros inside the unit circle: 0 for a filter
with a stable inverse, -1 for a delay by one token. The index that training started from stands beside it, since a filter
that hardly moved shows its initialisation and nothing that was learned. With ``autoencoder`` steps a third one stands
there: that of the same filters, from the same start, trained to rebuild the whole input from the last hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from evals.information import InformationConfig, autoencoder
from evals.suite import Parts, Result, Subject, suite
from mixers.toeplitz import Toeplitz
from models.config import at_least
from models.lm import LanguageModel, model_for


@dataclass
class FredholmConfig:
    """See `conf/suite/fredholm.yaml`."""

    near_zero: float = 1e-3
    autoencoder: int = 0

    def check(self, path: str) -> None:
        at_least(f"{path}.autoencoder", self.autoencoder, 0)
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
    """Metrics ``index/layer=<l>``, ``initial_index/layer=<l>`` and, if asked for, ``autoencoder_index/layer=<l>``: means over
    filters whose index is defined; ``autoencoder_nats`` says how well the input was rebuilt. Table ``filters``: every filter,
    with a warning where a zero lies so near the circle that the index says little."""
    result = Result()
    now, before = indices(subject.model), indices(model_for(subject.config, subject.dataset))
    if not now:
        result.metrics["index"] = None
        result.reasons["index"] = f"mixer {subject.config.mixer.kind} has no Toeplitz filters"
        return result
    for row, first in zip(now, before, strict=True):
        row["initial_index"], row["initial_margin"] = first["index"], first["margin"]
        row["near_zero"] = row["index"] is None or row["margin"] < config.near_zero
    names = ["index", "initial_index"]
    if config.autoencoder:
        found, result.metrics["autoencoder_nats"] = parts(
            "autoencoder", lambda: _rebuilding(subject, config.autoencoder)
        )
        for row, one in zip(now, found, strict=True):
            row["autoencoder_index"] = one
        names.append("autoencoder_index")
    result.tables["filters"] = now
    for layer in sorted({row["layer"] for row in now}):
        for name in names:
            defined = [row[name] for row in now if row["layer"] == layer and row[name] is not None]
            key = f"{name}/layer={layer}"
            result.metrics[key] = fmean(defined) if defined else None
            if not defined:
                result.reasons[key] = "every filter of the layer has a zero on the unit circle"
    result.metrics["near_zero"] = fmean(row["near_zero"] for row in now)
    return result


def _rebuilding(subject: Subject, steps: int) -> tuple[list[int | None], float]:
    """Indices of the filters of an autoencoder, and the nats a token that it leaves. It reads what the run read in a step: all
    lags of the filters must be used, or they keep the index of their start."""
    config = InformationConfig(length=subject.dataset.seq_len, steps=steps, batch=subject.config.global_batch)
    encoder, nats = autoencoder(subject, config)
    return [row["index"] for row in indices(encoder)], nats
