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
    """(B, T) nats of a batch of long sequences on the CPU. Read about ``chunk`` tokens at a time with carried state; in
    another mode than the deployed one in a single pass, since only the deployed model has a state."""
    model, precision = subject.model, subject.config.precision
    if mode != model.modes[0]:
        with autocast(subject.device, precision):
            return model.grade(to_device(batch, subject.device), mode).nats_BT.float().cpu()
    rows, steps = batch.inputs_BT.shape
    pieces = _pieces(steps, chunk, batch.segment_ids_BT)
    if rows > 1 and max(b - a for a, b in pieces) > chunk:  # fewer rows have fewer borders in the way
        halves = (slice(rows // 2), slice(rows // 2, None))
        return torch.cat([nats_of(subject, _rows(batch, half), mode, chunk) for half in halves])
    batch = to_device(batch, subject.device)
    with autocast(subject.device, precision):
        state = model.init_state(rows, steps)
        parts = []
        for begin, end in pieces:
            part = slice(begin, end)
            segments = None if batch.segment_ids_BT is None else batch.segment_ids_BT[:, part]
            features_BTD, state = model.read(
                batch.inputs_BT[:, part], state, segment_ids_BT=segments, donate_state=True
            )
            targets_BT = batch.targets_BT[:, part]
            parts.append(model.graded(features_BTD, batch._replace(targets_BT=targets_BT, answers_BT=None)).nats_BT)
    return torch.cat(parts, dim=1).float().cpu()


def _pieces(steps: int, chunk: int, segment_ids_BT: Tensor | None) -> list[tuple[int, int]]:
    """(begin, end) of the pieces that ``steps`` tokens are read in: of ``chunk`` tokens each, but no piece begins where some
    row's document does, since a state that is carried on belongs to the document of the next column. A piece is then
    shorter; longer only where the next ``chunk`` columns offer no other place."""
    free = np.ones(steps + 1, dtype=bool)  # may a piece end before this column?
    if segment_ids_BT is not None:
        free[1:-1] = (segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]).all(dim=0).cpu().numpy()
    pieces, begin = [], 0
    while begin < steps:
        ends = np.flatnonzero(free[begin + 1 :]) + begin + 1
        near = ends[ends <= begin + chunk]
        end = int(near[-1] if len(near) else ends[0])
        pieces.append((begin, end))
        begin = end
    return pieces


def _rows(batch: Batch, rows: slice | Tensor) -> Batch:
    """Some rows of a batch of text."""

    def pick(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows]

    return batch._replace(
        inputs_BT=batch.inputs_BT[rows],
        targets_BT=batch.targets_BT[rows],
        segment_ids_BT=pick(batch.segment_ids_BT),
        document_BT=pick(batch.document_BT),
    )


def sequences(dataset: Dataset, split: str, rows: int, count: int) -> Iterator[Batch]:
    """The first ``count`` whole windows of a split, ``rows`` at a time; a padded last one is left out."""
    left = count
    for batch in dataset.eval_batches(split, rows):
        assert batch.document_BT is not None
        whole = (batch.document_BT >= 0).all(dim=1)
        take = whole.nonzero()[:left, 0]
        if len(take):
            yield _rows(batch, take)
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
