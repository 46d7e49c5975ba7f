"""How far a two-pass model's memories are apart, position by position: what teacher-forced numbers hide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.memory_distance import distance
from models.two_pass import TwoPassModel


@dataclass(frozen=True)
class Drift:
    """RMS distances (0 to 2 for memories of unit size) from the prefiller's memory, means over rows and a range of
    positions."""

    edges: list[int]  # range i is positions edges[i] to edges[i + 1] - 1, from 0
    teacher_forced: list[float]  # of the decoder that reads the prefiller's memory: what the consistency loss sees
    recurrent: list[float]  # of the decoder that reads its own: what is deployed

    def named(self) -> dict[str, dict[str, float]]:
        """By name, then by range, as in ``drift`` and ``64-127``."""
        ranges = [f"{a}-{b - 1}" for a, b in zip(self.edges, self.edges[1:], strict=False)]
        return {
            "distance": dict(zip(ranges, self.teacher_forced, strict=True)),
            "drift": dict(zip(ranges, self.recurrent, strict=True)),
        }

    def plain(self) -> dict[str, Any]:
        """For run.json."""
        return {"edges": self.edges, "teacher_forced": self.teacher_forced, "recurrent": self.recurrent}


@torch.no_grad()
def drift(model: TwoPassModel, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Drift:
    """Both distances over a sequence of any length, in ranges that double: 0-7, 8-15, 16-31, ..."""
    was_training = model.training
    model.eval()
    try:
        first, second = model.both_passes(tokens_BT, segment_ids_BT)
        own_BTD = model.recurrent_memory(tokens_BT, segment_ids_BT)
    finally:
        model.train(was_training)
    edges = _edges(tokens_BT.shape[1])
    return Drift(
        edges,
        _means(distance(second.memory_BTD, first.memory_BTD, eps=0.0), edges),
        _means(distance(own_BTD, first.memory_BTD, eps=0.0), edges),
    )


def _edges(steps: int) -> list[int]:
    edges = [0]
    width = 8
    while width < steps:
        edges.append(width)
        width *= 2
    return [*edges, steps]


def _means(apart_BT: Tensor, edges: list[int]) -> list[float]:
    return [float(apart_BT[:, a:b].mean()) for a, b in zip(edges, edges[1:], strict=False)]


def long_sequences(batches: Any, length: int, rows: int, bos_id: int | None) -> tuple[Tensor | None, Tensor | None]:
    """Tokens (B, T) of ``length`` and at most ``rows`` rows from windows that follow each other in a text, None where there
    are too few; and their documents, if the windows keep documents apart."""
    found: list[Tensor] = []
    apart = False
    for batch in batches:
        if batch.document_BT is not None:
            whole_B = (batch.document_BT >= 0).all(dim=1)  # padding ends the text
            found.append(batch.inputs_BT[whole_B])
            apart |= batch.segment_ids_BT is not None
        if sum(part.numel() for part in found) >= length * rows:
            break
    if not found:
        return None, None
    flat = torch.cat(found).flatten()
    n = min(rows, len(flat) // length)
    if not n:
        return None, None
    tokens_BT = flat[: n * length].view(n, length)
    if not apart or bos_id is None:
        return tokens_BT, None
    return tokens_BT, torch.eq(tokens_BT, bos_id).cumsum(dim=1)
