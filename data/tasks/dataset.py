"""A task as `data.dataset.Dataset`: training examples without end, and fixed sets for evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.dataset import IGNORED, Batch
from data.randomness import key
from data.stream import Stream
from data.tasks.base import SPLITS, Examples, TaskConfig, in_split, join, share
from data.tasks.score import TaskScore

BLOCK = 64
"""Examples that are made at a time, from one seed. Which examples exist depends on it."""

TRIES = 1000
"""Rounds of drawing after which a split counts as empty."""


def open_dataset(data_cfg: TaskConfig, tokenizer_cfg: Any, *, global_batch: int, seed: int, cache: Path) -> TaskDataset:
    """Opens a task; there is nothing to prepare, so tokenizer and cache play no part. See
    ``data.dataset.open_dataset``."""
    return TaskDataset(data_cfg, global_batch=global_batch, seed=seed)


class TaskDataset:
    """Training example i = step * global_batch + row is a pure function of (seed, i): it lies in block i // 64, and each
    block is drawn from a seed of its own. With ``train_examples`` it is instead one of a fixed set, in an order that
    the seed decides."""

    def __init__(self, cfg: TaskConfig, *, global_batch: int, seed: int) -> None:
        self.cfg, self.global_batch, self.seed = cfg, global_batch, seed
        self.tokenizer, self.bos_id = None, None
        self.vocab_size, self.seq_len = cfg.vocab_size, cfg.seq_len
        self.continuous, self.input_width, self.readout = cfg.continuous, cfg.input_width, cfg.readout
        self.n_train_tokens: int | None = None
        self.stream: Stream | None = None
        if cfg.train_examples is not None:
            self.n_train_tokens = cfg.train_examples * cfg.seq_len
            self.stream = Stream(cfg.train_examples, global_batch=global_batch, seed=seed)
        self.fingerprint = _fingerprint(cfg)
        self._blocks: dict[int, Examples] = {}  # those of the latest step
        self._sets: dict[str, Examples] = {}  # what is fixed: evaluation, and a train split of a set size

    def train_batch(self, step: int, rows: slice | None = None) -> Batch:
        if step < 0:
            raise ValueError(f"step={step}: must not be negative")
        every = np.arange(self.global_batch)
        wanted = every if rows is None else every[rows]
        if not wanted.size:
            raise ValueError(f"rows={rows}: selects nothing of a global batch of {self.global_batch}")
        if self.cfg.n_graded is not None:
            return self._batch(self._train(step, wanted), n_targets=self.cfg.n_graded * self.global_batch)
        # How much of the other rows is graded is known only once they are made.
        examples = self._train(step, every)
        n_targets = int(np.count_nonzero(self._graded(examples)))
        return self._batch(examples if rows is None else examples.take(rows), n_targets=n_targets)

    def _train(self, step: int, rows: np.ndarray) -> Examples:
        """The examples at ``rows`` of a step."""
        if self.stream is not None:
            return self._set("train").take(self.stream.windows(step)[rows])
        blocks, places = np.divmod(step * self.global_batch + rows, BLOCK)
        latest, needed = self._blocks, {}  # replaced, never changed: threads may share the data set
        for block in np.unique(blocks).tolist():
            needed[block] = latest[block] if block in latest else self._block("train", block, seed=self.seed)
        self._blocks = needed
        first = int(blocks.min())
        return join([*needed.values()]).take(_as_slice((blocks - first) * BLOCK + places))

    def eval_batches(self, split: str, batch_size: int, max_tokens: int | None = None) -> Iterator[Batch]:
        self.n_documents(split)
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        return self._eval_batches(split, batch_size, max_tokens)

    def _eval_batches(self, split: str, batch_size: int, max_tokens: int | None) -> Iterator[Batch]:
        n = self.n_documents(split)
        if max_tokens is not None:
            n = min(n, max(1, max_tokens // self.seq_len))
        for start in range(0, n, batch_size):
            yield self._batch(self._set(split).take(slice(start, min(n, start + batch_size))), first=start)

    def n_documents(self, split: str) -> int:
        """Examples of a split; of a train split without end, 0."""
        if split not in SPLITS:
            raise ValueError(f"split={split}: must be one of {', '.join(SPLITS)}")
        if split == "train":
            return self.cfg.train_examples or 0
        return self.cfg.eval_examples

    def document_bytes(self, split: str) -> np.ndarray:
        """Zeros: an example is no text."""
        return np.zeros(self.n_documents(split), dtype=np.int64)

    def new_score(self, split: str) -> TaskScore:
        return self.cfg.new_score(self.n_documents(split))

    def _set(self, split: str) -> Examples:
        """All examples of what is fixed, made at first use: the same for every seed."""
        if split not in self._sets:
            n = self.n_documents(split)
            blocks = [self._block(split, block) for block in range(-(-n // BLOCK))]
            self._sets = self._sets | {split: join(blocks).take(slice(0, n))}
        return self._sets[split]

    def _block(self, split: str, block: int, *, seed: int | None = None) -> Examples:
        """BLOCK examples of a split: what is drawn and belongs to another split is drawn again."""
        source = ("fixed",) if seed is None else ("run", seed)
        rng = np.random.default_rng(key("task", self.cfg.kind, split, *source, block))
        found: list[Examples] = []
        missing, chance = BLOCK, share(split)
        for _ in range(TRIES):
            # Enough for all that is missing in most cases: two standard deviations above the mean. Small enough to stay
            # in the cache, which counts for the splits where most draws are in vain.
            n = int((missing + 2 * (missing * (1 - chance)) ** 0.5) / chance) + 1
            examples = self.cfg.sample(rng, min(n, 2 * BLOCK))
            found.append(examples.take(np.flatnonzero(in_split(examples.content, split))[:missing]))
            missing -= len(found[-1].inputs)
            if not missing:
                return join(found)
        raise ValueError(
            f"data.kind={self.cfg.kind}: with these fields there are too few different examples for a {split} split of "
            "its own; make the task larger"
        )

    def _graded(self, examples: Examples) -> np.ndarray:
        return ~np.isnan(examples.targets) if self.continuous else examples.targets != IGNORED

    def _batch(self, examples: Examples, *, n_targets: int | None = None, first: int = 0) -> Batch:
        """A training batch of a step with ``n_targets``, or one of evaluation that begins with example ``first``."""
        document = slices = answers = None
        if n_targets is None:
            graded = self._graded(examples)
            n_targets = int(np.count_nonzero(graded))
            document = torch.from_numpy(np.where(graded, first + np.arange(len(graded))[:, None], -1))
            slices = {name: torch.from_numpy(labels) for name, labels in examples.slices.items()}
            answers = None if examples.answers is None else torch.from_numpy(examples.answers)
        return Batch(
            inputs_BT=torch.from_numpy(examples.inputs),
            targets_BT=torch.from_numpy(examples.targets),
            segment_ids_BT=None,
            n_targets=n_targets,
            document_BT=document,
            answers_BT=answers,
            slices=slices,
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_blocks": {}, "_sets": {}}  # made again where they are needed


def _as_slice(rows: np.ndarray) -> Any:
    """Consecutive rows as a slice, which copies nothing."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else rows


def _fingerprint(cfg: TaskConfig) -> str:
    """Of the config and of some examples: it also changes with the task's code and with the generator behind it."""
    examples = cfg.sample(np.random.default_rng(key("task", cfg.kind, "fingerprint")), BLOCK)
    digest = hashlib.sha256(json.dumps([BLOCK, asdict(cfg)], sort_keys=True).encode())
    for array in (examples.inputs, examples.targets):
        # Real numbers may differ in their last bit from machine to machine.
        digest.update(np.round(array, 3).tobytes() if cfg.continuous else array.tobytes())
    return digest.hexdigest()[:16]
