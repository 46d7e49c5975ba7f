"""Packed text: token files read in windows of T + 1 tokens, a stride of T apart.

Window w reads tokens w T ... w T + T; its inputs are the first T and its targets the last T, so neighbouring windows
share one token and every token but the very first is a target once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from data.config import BpeConfig, BytesConfig, CorpusConfig
from data.corpus import SPLITS
from data.dataset import IGNORED, Batch
from data.metrics import TextScore
from data.prepare import MANIFEST, prepare
from data.stream import Stream
from data.tokenizers import Tokenizer, load_tokenizer


def open_dataset(
    data_cfg: CorpusConfig, tokenizer_cfg: BytesConfig | BpeConfig, *, global_batch: int, seed: int, cache: Path
) -> PackedDataset:
    """Prepares a corpus if needed and opens it. See ``data.dataset.open_dataset``."""
    folder = prepare(data_cfg, tokenizer_cfg, cache)
    return PackedDataset(
        folder,
        load_tokenizer(tokenizer_cfg, folder),
        seq_len=data_cfg.seq_len,
        packing=data_cfg.packing,
        global_batch=global_batch,
        seed=seed,
    )


class Split:
    """The two files of one split, memory-mapped at first use and again in every process that unpickles it."""

    def __init__(self, folder: Path, name: str, dtype: str, counts: dict[str, int]) -> None:
        """Raises ValueError if the token file is not as long as its manifest says."""
        self.folder, self.name, self.dtype = folder, name, np.dtype(dtype)
        self.n_documents, self.n_tokens = counts["documents"], counts["tokens"]
        file = folder / f"{name}.bin"
        if file.stat().st_size != self.n_tokens * self.dtype.itemsize:
            raise ValueError(
                f"{file}: not of the size that its manifest states; remove the folder to have it made again"
            )
        self._open: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def files(self) -> tuple[np.ndarray, np.ndarray]:
        """(n_tokens,) tokens and (n_documents,) int64 offsets of each BOS."""
        if self._open is None:
            tokens = np.memmap(self.folder / f"{self.name}.bin", dtype=self.dtype, mode="r")
            starts = np.load(self.folder / f"{self.name}_documents.npy", mmap_mode="r")
            # Plain views: the memmap class makes each indexing several times slower.
            self._open = tokens.view(np.ndarray), starts.view(np.ndarray)
        return self._open

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}  # or pickle would copy the whole file


class PackedDataset:
    """A corpus as ``data.dataset.Dataset``."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, *, seq_len: int, packing: str, global_batch: int, seed: int
    ) -> None:
        """``folder`` as ``prepare`` makes it. Raises ValueError if the train split is shorter than one window."""
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["tokenizer_fingerprint"] != tokenizer.fingerprint:
            raise ValueError(f"{folder}: was tokenized with another tokenizer; remove the folder to have it made again")
        self.folder, self.tokenizer, self.seq_len, self.packing = folder, tokenizer, seq_len, packing
        self.vocab_size, self.bos_id = tokenizer.vocab_size, tokenizer.bos_id
        self.splits = {name: Split(folder, name, manifest["dtype"], manifest["splits"][name]) for name in SPLITS}
        self.n_train_tokens = self.splits["train"].n_tokens
        n_windows = (self.n_train_tokens - 1) // seq_len
        if n_windows < 1:
            raise ValueError(f"data.seq_len={seq_len}: the train split has only {self.n_train_tokens} tokens")
        self.stream = Stream(n_windows, global_batch=global_batch, seed=seed)
        content = ("format", "source", "val_fraction", "test_fraction", "tokenizer_fingerprint")
        read = {"packing": packing, "seq_len": seq_len} | {name: manifest[name] for name in content}
        self.fingerprint = hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:16]

    def train_batch(self, step: int, rows: slice | None = None) -> Batch:
        windows = self.stream.windows(step)
        tokens, starts = self.splits["train"].files
        # BOS among the targets of each window, from where documents start: other rows need not be read.
        first = windows * self.seq_len
        n_bos = np.searchsorted(starts, first + self.seq_len, "right") - np.searchsorted(starts, first, "right")
        n_targets = windows.size * self.seq_len - int(n_bos.sum())
        if rows is not None:
            windows = windows[rows]
            if not windows.size:
                raise ValueError(f"rows={rows}: selects nothing of a global batch of {self.stream.global_batch}")
        # Row w of this view is window w; indexing it copies whole rows.
        size = tokens.itemsize
        shape, strides = (self.stream.n_windows, self.seq_len + 1), (self.seq_len * size, size)
        view = as_strided(tokens, shape, strides, writeable=False)
        return self._batch(view[windows], n_targets=n_targets)

    def eval_batches(self, split: str, batch_size: int, max_tokens: int | None = None) -> Iterator[Batch]:
        self._split(split)
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        return self._eval_batches(split, batch_size, max_tokens)

    def _eval_batches(self, split: str, batch_size: int, max_tokens: int | None) -> Iterator[Batch]:
        tokens, starts = self._split(split).files
        n_windows = -(-(len(tokens) - 1) // self.seq_len)
        if max_tokens is not None:
            n_windows = min(n_windows, max(1, max_tokens // self.seq_len))
        for window in range(0, n_windows, batch_size):
            n_rows = min(batch_size, n_windows - window)
            first = (window + np.arange(n_rows)[:, None]) * self.seq_len
            positions = first + np.arange(self.seq_len + 1)
            padding = positions >= len(tokens)
            read = np.where(padding, self.bos_id, tokens[np.minimum(positions, len(tokens) - 1)])
            document = np.searchsorted(starts, positions[:, 1:], "right") - 1
            document[padding[:, 1:]] = -1
            yield self._batch(read, document=document, padding=padding)

    def n_documents(self, split: str) -> int:
        return self._split(split).n_documents

    def new_score(self, split: str) -> TextScore:
        return TextScore(self.n_documents(split), self.tokenizer.token_bytes)

    def document_bytes(self, split: str) -> np.ndarray:
        tokens, starts = self._split(split).files
        return np.add.reduceat(self.tokenizer.token_bytes[tokens], starts)

    def _split(self, split: str) -> Split:
        if split not in self.splits:
            raise ValueError(f"split={split}: must be one of {', '.join(SPLITS)}")
        return self.splits[split]

    def _batch(
        self,
        read: np.ndarray,
        *,
        n_targets: int | None = None,
        document: np.ndarray | None = None,
        padding: np.ndarray | None = None,
    ) -> Batch:
        """(R, T + 1) tokens -> a batch."""
        inputs, targets = read[:, :-1].astype(np.int64), read[:, 1:].astype(np.int64)
        segments = None
        if self.packing == "bos_reset":
            starts = inputs == self.bos_id
            if padding is not None:
                starts &= ~padding[:, :-1]  # padding opens no documents of its own
            starts[:, 0] = False
            segments = torch.from_numpy(np.cumsum(starts, axis=1, dtype=np.int64))
        # No model is asked where documents end: BOS says nothing about the text.
        np.putmask(targets, targets == self.bos_id, IGNORED)
        if n_targets is None:
            n_targets = int(np.count_nonzero(targets != IGNORED))
        return Batch(
            inputs_BT=torch.from_numpy(inputs),
            targets_BT=torch.from_numpy(targets),
            segment_ids_BT=segments,
            n_targets=n_targets,
            document_BT=None if document is None else torch.from_numpy(document),
        )
