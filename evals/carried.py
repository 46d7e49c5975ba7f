"""Scoring long sequences with carried state: memory stays that of one chunk, whatever the length."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from data.dataset import Batch, Dataset
from evals.suite import Subject
from models.evaluate import autocast, to_device
from runs.load import open_data


def long_dataset(subject: Subject, length: int) -> Dataset:
    """The run's corpus in windows of ``length`` tokens. Raises ValueError for a task, whose length is its own."""
    config = subject.config
    if config.data.kind != "corpus":
        raise ValueError(
            f"data.kind={config.data.kind}: a task's examples have a length of their own; this suite needs text"
        )
    return open_data(dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=length)))


@torch.no_grad()
def nats_of(subject: Subject, batch: Batch, mode: str, chunk: int) -> Tensor:
    """(B, T) nats of a batch of long sequences on the CPU. Read ``chunk`` tokens at a time with carried state; in another
    mode than the deployed one in a single pass, since only the deployed model has a state."""
    model = subject.model
    batch = to_device(batch, subject.device)
    with autocast(subject.device, subject.config.precision):
        if mode != model.modes[0]:
            return model.grade(batch, mode).nats_BT.float().cpu()
        rows, steps = batch.inputs_BT.shape
        state = model.init_state(rows, steps)
        parts = []
        for begin in range(0, steps, chunk):
            part = slice(begin, begin + chunk)
            features_BTD, state = model.read(batch.inputs_BT[:, part], state, donate_state=True)
            targets_BT = batch.targets_BT[:, part]
            parts.append(model.graded(features_BTD, batch._replace(targets_BT=targets_BT, answers_BT=None)).nats_BT)
        return torch.cat(parts, dim=1).float().cpu()


def sequences(dataset: Dataset, split: str, rows: int, count: int) -> Iterator[Batch]:
    """The first ``count`` whole windows of a split, ``rows`` at a time; a padded last one is left out."""
    left = count
    for batch in dataset.eval_batches(split, rows):
        assert batch.document_BT is not None
        whole = (batch.document_BT >= 0).all(dim=1)
        take = whole.nonzero()[:left, 0]
        if len(take):
            yield batch._replace(
                inputs_BT=batch.inputs_BT[take], targets_BT=batch.targets_BT[take], document_BT=batch.document_BT[take]
            )
        left -= len(take)
        if left <= 0:
            return


def scored(
    subject: Subject, dataset: Dataset, split: str, count: int, mode: str, chunk: int
) -> tuple[np.ndarray, np.ndarray]:
    """(N, T) nats in float64, so that sums are exact, and (N, T) bool, which targets are graded, of the first N <= count whole windows. The model's mode
    (train or eval) is kept."""
    was_training = subject.model.training
    subject.model.eval()
    nats, graded = [], []
    try:
        for batch in sequences(dataset, split, subject.rows(mode), count):
            nats.append(nats_of(subject, batch, mode, chunk).double().numpy())
            graded.append((batch.targets_BT != -100).numpy())
    finally:
        subject.model.train(was_training)
    if not nats:
        raise ValueError(f"split={split}: is shorter than one window of {dataset.seq_len} tokens")
    return np.concatenate(nats), np.concatenate(graded)
