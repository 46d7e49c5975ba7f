"""A prepared corpus as a data set: which rows a step reads (``data.stream``), and rows of tokens as batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.config import CorpusConfig, TokenizerConfig
from data.corpus import SPLITS
from data.dataset import IGNORED, Batch
from data.metrics import TextScore
from data.packing import BestFit, OneDocument, Packing, Windows
from data.prepare import MANIFEST, prepare
from data.stream import Stream
from data.tokenizers import Tokenizer, load_tokenizer

NPY_HEADER = 128
"""Bytes before the numbers in a .npy file of one axis."""


def open_dataset(
    data_cfg: CorpusConfig, tokenizer_cfg: TokenizerConfig, *, global_batch: int, seed: int, cache: Path
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
    """The files of one split, memory-mapped at first use and again in every process that unpickles it."""

    def __init__(self, folder: Path, name: str, dtype: str, counts: dict[str, int], with_domains: bool) -> None:
        """Raises ValueError if a file is missing, or not as long as its manifest says."""
        self.folder, self.name, self.dtype = folder, name, np.dtype(dtype)
        self.n_documents, self.n_tokens = counts["documents"], counts["tokens"]
        self.with_domains = with_domains
        self._open: tuple[np.ndarray, np.ndarray] | None = None
        sizes = {self.folder / f"{name}.bin": self.n_tokens * self.dtype.itemsize}
        for kind, size in (("documents", 8), ("domains", 2))[: 1 + with_domains]:
            sizes[folder / f"{name}_{kind}.npy"] = self.n_documents * size + NPY_HEADER
        for file, size in sizes.items():
            if not file.is_file():
                raise ValueError(f"{file}: is missing; remove the folder to have it made again")
            if file.stat().st_size != size:
                raise ValueError(
                    f"{file}: not of the size that its manifest states; remove the folder to have it made again"
                )

    @property
    def files(self) -> tuple[np.ndarray, np.ndarray]:
        """(n_tokens,) tokens and (n_documents,) int64 offsets of each BOS."""
        if self._open is None:
            if not self.n_documents:  # nothing cannot be mapped
                self._open = np.empty(0, dtype=self.dtype), np.empty(0, dtype=np.int64)
                return self._open
            tokens = np.memmap(self.folder / f"{self.name}.bin", dtype=self.dtype, mode="r")
            starts = np.load(self.folder / f"{self.name}_documents.npy", mmap_mode="r")
            # Plain views: the memmap class makes each indexing several times slower.
            self._open = tokens.view(np.ndarray), starts.view(np.ndarray)
        return self._open

    def domains(self) -> np.ndarray:
        """(n_documents,) int16."""
        found: np.ndarray = np.load(self.folder / f"{self.name}_domains.npy")
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}  # or pickle would copy the whole file


class PackedDataset:
    """A corpus as ``data.dataset.Dataset``."""

    continuous, input_width, readout = False, None, "each"  # tokens in, tokens out

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, *, seq_len: int, packing: str, global_batch: int, seed: int
    ) -> None:
        """``folder`` as ``prepare`` makes it. Raises ValueError for a damaged one, and if the train split is shorter than
        one row. A corpus without a train split can be evaluated on, and nothing else."""
        if not (folder / MANIFEST).is_file():
            raise ValueError(f"{folder / MANIFEST}: is missing; remove the folder to have it made again")
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["tokenizer_fingerprint"] != tokenizer.fingerprint:
            raise ValueError(f"{folder}: was tokenized with another tokenizer; remove the folder to have it made again")
        self.folder, self.tokenizer, self.seq_len, self.packing = folder, tokenizer, seq_len, packing
        self.vocab_size, self.bos_id = tokenizer.vocab_size, tokenizer.bos_id
        self.domains: list[str] = manifest["domains"]
        self.splits = {
            name: Split(folder, name, manifest["dtype"], manifest["splits"][name], bool(self.domains))
            for name in SPLITS
        }
        self._packings: dict[tuple[str, int], Packing] = {}
        self.n_train_tokens = self.splits["train"].n_tokens
        self._stream: Stream | None = None
        if self.n_train_tokens:
            n_rows = self._packing("train").n_train
            if n_rows < 1:
                raise ValueError(f"data.seq_len={seq_len}: the train split has only {self.n_train_tokens} tokens")
            self._stream = Stream(n_rows, global_batch=global_batch, seed=seed)
        content = ("format", "source", "val_fraction", "test_fraction", "tokenizer_fingerprint")
        read = {"packing": packing, "seq_len": seq_len} | {name: manifest[name] for name in content}
        self.fingerprint = hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def stream(self) -> Stream:
        """Which rows each step reads. Raises ValueError if there is nothing to train on."""
        if self._stream is None:
            raise ValueError("data.hub_split=null: this corpus has no train split, it can only be evaluated on")
        return self._stream

    def train_batch(self, step: int, rows: slice | None = None) -> Batch:
        numbers = self.stream.windows(step)
        packing = self._packing("train")
        # What is not asked for, from where documents start: other rows need not be read.
        n_targets = numbers.size * self.seq_len - packing.n_bos(numbers)
        if rows is not None:
            numbers = numbers[rows]
            if not numbers.size:
                raise ValueError(f"rows={rows}: selects nothing of a global batch of {self.stream.global_batch}")
        return self._batch(packing.tokens(numbers), n_targets=n_targets)

    def eval_batches(self, split: str, batch_size: int, max_tokens: int | None = None) -> Iterator[Batch]:
        self._split(split)
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        return self._eval_batches(split, batch_size, max_tokens)

    def _eval_batches(self, split: str, batch_size: int, max_tokens: int | None) -> Iterator[Batch]:
        packing = self._packing(split)
        n_rows = packing.n_eval
        if max_tokens is not None:
            n_rows = min(n_rows, max(1, max_tokens // self.seq_len))
        for first in range(0, n_rows, batch_size):
            read = packing.evaluation(np.arange(first, min(first + batch_size, n_rows)))
            yield self._batch(read.tokens, document=read.document)

    def n_documents(self, split: str) -> int:
        return self._split(split).n_documents

    def new_score(self, split: str) -> TextScore:
        return TextScore(self.n_documents(split), self.tokenizer.token_bytes, self.document_domains(split))

    def document_bytes(self, split: str) -> np.ndarray:
        tokens, starts = self._split(split).files
        return np.add.reduceat(self.tokenizer.token_bytes[tokens], starts)

    def document_tokens(self, split: str) -> np.ndarray:
        """(n_documents,) int64: tokens of each document, without BOS."""
        tokens, starts = self._split(split).files
        return np.diff(np.append(starts, len(tokens))) - 1

    def document_domains(self, split: str) -> tuple[list[str], np.ndarray] | None:
        """Names of the corpus' domains and (n_documents,) int64, the number of each document's; None if it has none."""
        found = self._split(split)
        return (list(self.domains), found.domains().astype(np.int64)) if self.domains else None

    def _packing(self, split: str) -> Packing:
        """Made when it is needed, and again in every process."""
        key = (split, self.seq_len)
        if key not in self._packings:
            tokens, starts = self._split(split).files
            if self.packing == "best_fit":
                made: Packing = BestFit(tokens, starts, self.seq_len, self.bos_id, self.folder / "packings", split)
            elif self.packing == "rows":
                made = OneDocument(tokens, starts, self.seq_len, self.bos_id)
            else:
                made = Windows(tokens, starts, self.seq_len, self.bos_id)
            self._packings[key] = made
        return self._packings[key]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_packings": {}}  # they hold the files

    def _split(self, split: str) -> Split:
        if split not in self.splits:
            raise ValueError(f"split={split}: must be one of {', '.join(SPLITS)}")
        return self.splits[split]

    def _batch(self, read: np.ndarray, *, n_targets: int | None = None, document: np.ndarray | None = None) -> Batch:
        """(R, T + 1) tokens -> a batch. ``document`` (R, T + 1), -1 for padding: for evaluation."""
        inputs, targets = read[:, :-1].astype(np.int64), read[:, 1:].astype(np.int64)
        segments = None
        if self.packing == "bos_reset":
            starts = inputs == self.bos_id
            if document is not None:
                starts &= document[:, :-1] >= 0  # padding opens no documents of its own
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
            document_BT=None if document is None else torch.from_numpy(document[:, 1:].astype(np.int64)),
        )
