"""Scoring a language model on a split of a data set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from data.dataset import Batch, Dataset, Score
from models.lm import LanguageModel

if TYPE_CHECKING:
    from runs.schema import Trainer


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
        answers_BT=move(batch.answers_BT),
    )


def batch_size(trainer: Trainer, mode: str) -> int:
    """Rows that are scored at once. Token by token there can be many: their logits never exist together, and the time of
    a step hardly depends on their number."""
    return trainer.recurrent_batch if mode == "recurrent" else trainer.eval_batch


def by_mode(split: str, metrics: dict[str, float], mode: str, modes: tuple[str, ...]) -> dict[str, float]:
    """``<split>/<metric>`` for the deployed mode, and ``<split>/<mode>/<metric>`` for each where there are several."""
    named = {f"{split}/{mode}/{name}": value for name, value in metrics.items()} if modes != ("parallel",) else {}
    return named | ({f"{split}/{name}": value for name, value in metrics.items()} if mode == modes[0] else {})


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
    mode: str | None = None,
) -> Score:
    """Score ``split`` in windows of the training length, each token that is not BOS once.

    The model's train or eval mode is kept. ``mode`` is one of ``model.modes``, by default the deployed one. ``batches``
    replaces the whole list, for one process of several.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = dataset.new_score(split)
    try:
        if batches is None:
            batches = dataset.eval_batches(split, batch_size, max_tokens)
        for batch in batches:
            with autocast(device, precision):
                graded = model.grade(to_device(batch, device), mode)
            total.add(batch, *graded)
    finally:
        model.train(was_training)
    return total


def reduce_score(total: Score, device: torch.device) -> Score:
    """The sum over all processes, in place."""
    totals = torch.from_numpy(total.totals()).to(device)
    torch.distributed.all_reduce(totals)
    total.set_totals(totals.cpu().numpy())
    return total
