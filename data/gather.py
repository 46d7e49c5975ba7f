"""The second half of an external sort of documents by hash (``data.scatter`` is the first), and their tokens.

The space of hashes is cut into **buckets**; the documents of a bucket are gathered from all runs, sorted and tokenized.
Buckets in order are the shuffled corpus, whatever the number of units, runs, buckets or processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.config import CorpusConfig
from data.corpus import SPLITS, shares
from data.scatter import INDEX
from data.tokenizers import Tokenizer
from data.write import at_once, write_json

BUCKET_BYTES = 1 << 27
"""Text of a bucket, at most, about: a process holds it together with its tokens."""

SMALL_BUCKET_BYTES, FEW_BUCKETS = 1 << 22, 64
"""So that the processes share a small corpus too. Many buckets of a large one would cost: each opens every run."""


def n_buckets_of(n_bytes: int) -> int:
    """Of a corpus of so much text, however many processes there are: a restart with more of them finds what is done."""
    return max(-(-n_bytes // BUCKET_BYTES), min(FEW_BUCKETS, -(-n_bytes // SMALL_BUCKET_BYTES)))


COUNTS = "counts.json"

PART = np.dtype([("tokens", "<i8"), ("domain", "<i4")])
"""Of one document in a bucket; tokens with BOS."""


@dataclass(frozen=True)
class Slice:
    """The part of a unit that belongs to the corpus."""

    folder: str
    runs: int
    split: str | None
    rows: int | None
    """Documents from the start; None: all."""

    domains: tuple[int, ...]
    """Number of each of the unit's domains among those of the corpus."""


@dataclass
class Bucket:
    """Its documents in the order of the corpus."""

    texts: list[bytes]
    splits: np.ndarray
    """(n,) numbers in ``SPLITS``."""

    domains: np.ndarray
    """(n,) numbers of domains, -1 for none."""


def gather(slices: Sequence[Slice], number: int, n_buckets: int, cfg: CorpusConfig) -> Bucket:
    """Bucket ``number`` of ``n_buckets``: equal ranges of hashes."""
    low, high = number * 2**64 // n_buckets, (number + 1) * 2**64 // n_buckets
    texts: list[bytes] = []
    tables: list[np.ndarray] = [np.empty(0, dtype=INDEX)]
    splits: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    for part in slices:
        for run in range(part.runs):
            file = Path(part.folder) / str(run)
            keys = np.load(f"{file}.keys.npy", mmap_mode="r")
            first = int(np.searchsorted(keys, np.uint64(low)))
            last = len(keys) if high == 2**64 else int(np.searchsorted(keys, np.uint64(high)))
            if first == last:
                continue
            table = np.array(np.load(f"{file}.index.npy", mmap_mode="r")[first:last])
            starts = table["offset"] - table["offset"][0]
            with open(f"{file}.text", "rb") as text_file:
                text_file.seek(int(table["offset"][0]))
                raw = text_file.read(int(table["bytes"].sum()))
            kept = np.ones(len(table), dtype=bool) if part.rows is None else table["row"] < part.rows
            texts.extend(raw[starts[i] : starts[i] + table["bytes"][i]] for i in np.flatnonzero(kept))
            table = table[kept]
            names = np.array([*part.domains, -1])  # the last one is found by the number -1
            table["domain"] = names[table["domain"]]
            tables.append(table)
            splits.append(_splits(table["position"], part.split, cfg))
    table, split = np.concatenate(tables), np.concatenate(splits)
    order = np.lexsort((split, table["domain"], table["key2"], table["key1"], table["key0"]))
    return Bucket([texts[i] for i in order], split[order], table["domain"][order])


def _splits(positions: np.ndarray, fixed: str | None, cfg: CorpusConfig) -> np.ndarray:
    """As ``data.corpus.split_of``, for many."""
    if fixed is not None:
        return np.full(len(positions), SPLITS.index(fixed))
    test, val = shares(cfg)
    places = positions.astype(np.float64) / 2**64  # rounded as Python rounds the quotient of the integers
    return np.where(places < test, SPLITS.index("test"), np.where(places < test + val, SPLITS.index("val"), 0))


def train_texts(slices: Sequence[Slice], n_buckets: int, cfg: CorpusConfig, limit: int) -> Iterator[str]:
    """Texts of the train split in the order of the corpus, until they have ``limit`` bytes."""
    n_bytes = 0
    for number in range(n_buckets):
        bucket = gather(slices, number, n_buckets, cfg)
        for text, split in zip(bucket.texts, bucket.splits, strict=True):
            if SPLITS[split] == "train":
                yield text.decode()
                n_bytes += len(text)
                if n_bytes >= limit:
                    return


def tokenize(
    slices: Sequence[Slice],
    n_buckets: int,
    cfg: CorpusConfig,
    tokenizer: Tokenizer,
    dtype: str,
    folder: Path,
    number: int,
) -> dict[str, dict[str, int]]:
    """Writes one bucket's tokens and table of documents for each split; returns and stores counts by split.

    Raises ValueError if a document's tokens do not hold exactly its bytes.
    """
    done = folder / str(number)
    if done.exists():
        found: dict[str, dict[str, int]] = json.loads((done / COUNTS).read_text(encoding="utf-8"))
        return found
    # A process is a core's worth: threads for a few words cost more than they bring.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with at_once(done) as part:
        counts = _write(gather(slices, number, n_buckets, cfg), tokenizer, dtype, part)
        write_json(part / COUNTS, counts)
    return counts


def _write(bucket: Bucket, tokenizer: Tokenizer, dtype: str, folder: Path) -> dict[str, dict[str, int]]:
    bos = np.array([tokenizer.bos_id], dtype=dtype).tobytes()
    counts = {}
    for split, name in enumerate(SPLITS):
        chosen = np.flatnonzero(bucket.splits == split)
        table = np.empty(len(chosen), dtype=PART)
        table["domain"] = bucket.domains[chosen]
        n_bytes = 0
        with (folder / f"{name}.bin").open("wb") as file:
            for place, document in enumerate(chosen):
                raw = bucket.texts[document]
                ids = tokenizer.encode(raw.decode())
                if (held := int(tokenizer.token_bytes[ids].sum())) != len(raw):
                    raise ValueError(
                        f"tokenizer: a document of {len(raw)} bytes became tokens of {held} bytes, so that bits per byte "
                        f"would be wrong; it begins {raw[:60].decode(errors='replace')!r}"
                    )
                file.write(bos + ids.astype(dtype).tobytes())
                table["tokens"][place] = 1 + len(ids)
                n_bytes += len(raw)
        np.save(folder / f"{name}.npy", table)
        counts[name] = {"documents": len(chosen), "tokens": int(table["tokens"].sum()), "bytes": n_bytes}
    return counts
