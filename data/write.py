"""Files that appear at once or not at all, and those of a prepared folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

STARTS, DOMAINS = np.dtype("<i8"), np.dtype("<i2")
"""Of the tables of a prepared folder."""


def write_json(file: Path, value: Any) -> None:
    """At once or not at all."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(file)


@contextmanager
def at_once(folder: Path) -> Iterator[Path]:
    """Gives an empty folder of this process; what is then in it replaces ``folder``. Two processes that make the same
    never see, nor spoil, each other's halves."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    sync(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def sweep(folder: Path) -> None:
    """Removes what killed processes left of ``at_once`` in a folder."""
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Its files on disk, before a name says that they are whole: a machine may die too."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def assemble(
    parts: Path, folder: Path, split: str, n_buckets: int, counts: dict[str, int], *, with_domains: bool
) -> None:
    """Joins one split's buckets: tokens, starts of documents and, if there are any, their domains."""
    n = counts["documents"]
    position = 0
    with ExitStack() as files:
        tokens = files.enter_context((folder / f"{split}.bin").open("wb"))
        starts = files.enter_context(_array(folder / f"{split}_documents.npy", STARTS, n))
        domains = files.enter_context(_array(folder / f"{split}_domains.npy", DOMAINS, n)) if with_domains else None
        for number in range(n_buckets):
            with (parts / str(number) / f"{split}.bin").open("rb") as source:
                shutil.copyfileobj(source, tokens, 1 << 24)
            table = np.load(parts / str(number) / f"{split}.npy")
            starts.write((position + np.cumsum(table["tokens"]) - table["tokens"]).astype(STARTS).tobytes())
            if domains is not None:
                domains.write(table["domain"].astype(DOMAINS).tobytes())
            position += int(table["tokens"].sum())


def _array(file: Path, dtype: np.dtype, n: int) -> BinaryIO:
    """A .npy file of ``n`` numbers, to be written on: that of a large corpus need not fit in memory. Not a map of it: where
    the disk is full, a write into a map kills the process."""
    stream = file.open("wb")
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (n,)}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream


def publish(whole: Path, final: Path, manifest: str) -> None:
    """Gives a finished folder its final name, or does nothing if another process was first."""
    sync(whole)
    try:
        whole.rename(final)
    except OSError:
        if not (final / manifest).exists():
            raise
