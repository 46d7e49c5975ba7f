"""Files that appear at once or not at all, and those of a prepared folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np


def write_json(file: Path, value: Any) -> None:
    """At once or not at all."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(file)


def assemble(
    parts: Path, folder: Path, split: str, n_buckets: int, counts: dict[str, int], *, with_domains: bool
) -> None:
    """Joins one split's buckets: tokens, starts of documents and, if there are any, their domains."""
    with (folder / f"{split}.bin").open("wb") as target:
        for number in range(n_buckets):
            with (parts / f"{number}.{split}.bin").open("rb") as source:
                shutil.copyfileobj(source, target, 1 << 24)
    n = counts["documents"]
    starts = _table(folder / f"{split}_documents.npy", np.dtype(np.int64), n)
    domains = _table(folder / f"{split}_domains.npy", np.dtype(np.int16), n) if with_domains else None
    place = position = 0
    for number in range(n_buckets):
        table = np.load(parts / f"{number}.{split}.npy")
        rows = slice(place, place + len(table))
        starts[rows] = position + np.cumsum(table["tokens"]) - table["tokens"]
        if domains is not None:
            domains[rows] = table["domain"]
        place, position = rows.stop, position + int(table["tokens"].sum())


def _table(file: Path, dtype: np.dtype, n: int) -> np.ndarray:
    """A new array on disk: that of a large corpus need not fit in memory."""
    if not n:
        np.save(file, np.empty(0, dtype=dtype))  # nothing cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=(n,))


def publish(whole: Path, final: Path, manifest: str) -> None:
    """Gives a finished folder its final name, or does nothing if another process was first."""
    for path in whole.iterdir():
        if path.is_file():
            # On disk before the name is: a machine that dies must not leave a whole-looking folder of empty files.
            with path.open("rb") as file:
                os.fsync(file.fileno())
    try:
        whole.rename(final)
    except OSError:
        if not (final / manifest).exists():
            raise
