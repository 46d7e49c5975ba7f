"""Scoring a language model on a split: nats, bits per byte, in total and per document."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from data.dataset import Batch, Dataset
from data.metrics import Score
from models.lm import LanguageModel


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The activations' precision: ``bf16`` or ``fp32``."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""

    def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, non_blocking=True)

    return batch._replace(
        inputs_BT=batch.inputs_BT.to(device, non_blocking=True),
        targets_BT=batch.targets_BT.to(device, non_blocking=True),
        segment_ids_BT=move(batch.segment_ids_BT),
        document_BT=move(batch.document_BT),
    )


@torch.no_grad()
def score(
    model: LanguageModel,
    dataset: Dataset,
    split: str,
    *,
    batch_size: int,
    precision: str = "fp32",
    max_tokens: int | None = None,
    batches: Iterable[Batch] | None = None,
) -> Score:
    """Score ``split`` in windows of the training length, each token that is not BOS once.

    The model's mode (train or eval) is kept. ``batches`` replaces the whole list, for one process of several.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = Score(dataset.n_documents(split), dataset.tokenizer.token_bytes)
    try:
        if batches is None:
            batches = dataset.eval_batches(split, batch_size, max_tokens)
        for batch in batches:
            with autocast(device, precision):
                nats_BT = model.token_nats(to_device(batch, device))
            total.add(nats_BT, batch.targets_BT, batch.document_BT)
    finally:
        model.train(was_training)
    return total


def reduce_score(total: Score, device: torch.device) -> Score:
    """The sum over all processes."""
    parts = np.concatenate([[total.tokens], total.document_nats, total.document_bytes])
    tensor = torch.from_numpy(parts.astype(np.float64)).to(device)
    torch.distributed.all_reduce(tensor)
    summed = tensor.cpu().numpy()
    n = len(total.document_nats)
    out = Score(n, total.token_bytes)
    out.tokens = int(summed[0])
    out.document_nats, out.document_bytes = summed[1 : n + 1], summed[n + 1 :].astype(np.int64)
    return out
