"""The first half of an external sort of documents by hash: a unit's documents as **runs**, sorted texts of some hundred
megabytes, each with an index. ``data.gather`` is the second half.

Memory is bounded, and what is finished survives a kill.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from data.config import CorpusConfig
from data.corpus import digest
from data.sources import Unit, read
from data.write import at_once, write_json

RUN_BYTES = 1 << 28
"""Text that a process holds before it writes a run."""

INDEX = np.dtype(
    [
        ("position", "<u8"),  # the first 8 bytes of the digest: the split
        ("key0", "<u8"),  # the others: the place in the order
        ("key1", "<u8"),
        ("key2", "<u8"),
        ("row", "<i8"),  # which document of its unit, empty ones not counted
        ("domain", "<i4"),  # number in the unit's list of names; -1: the corpus has none
        ("offset", "<i8"),  # in the run's text
        ("bytes", "<i8"),
    ]
)


def scatter(cfg: CorpusConfig, streaming: bool, unit: Unit, folder: Path) -> dict[str, Any]:
    """Makes ``folder`` with a unit's runs and its record, which is also returned. A folder whose record has the unit's stamp
    is not made again.

    The record: ``stamp``, ``documents``, ``empty`` (skipped), ``bytes``, ``runs``, ``domains`` (names) and ``source``
    (hex sum of hashes of the documents). Raises what ``data.sources.read`` raises.
    """
    if (done := record(folder, unit)) is not None:
        return done
    with at_once(folder) as part:
        writer = _Runs(part, unit.split)
        empty = 0
        for document in read(cfg, unit, streaming=streaming):
            if not document.text.strip():
                empty += 1
                continue
            writer.add(document.text, document.domain)
            # More than the limit cannot be needed; which of the last ones are is known when all units are.
            if unit.limited and reached(cfg, writer.documents, writer.bytes):
                break
        writer.flush()
        found = {
            "stamp": unit.stamp,
            "documents": writer.documents,
            "empty": empty,
            "bytes": writer.bytes,
            "runs": writer.runs,
            "domains": list(writer.domains),
            "source": f"{writer.source:x}",
        }
        write_json(part / "unit.json", found)
    return found


def record(folder: Path, unit: Unit) -> dict[str, Any] | None:
    """The record of a unit that is done, or None."""
    file = folder / "unit.json"
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found if found["stamp"] == unit.stamp else None


def reached(cfg: CorpusConfig, n_documents: int, n_bytes: int) -> bool:
    """Whether so much is all that ``max_documents`` and ``max_bytes`` allow."""
    return (cfg.max_documents is not None and n_documents >= cfg.max_documents) or (
        cfg.max_bytes is not None and n_bytes >= cfg.max_bytes
    )


def contribution(text_digest: bytes, domain: str | None, split: str | None) -> int:
    """One document's part of the corpus' hash: a sum, so that order plays no role and units can be added."""
    if domain is None and split is None:
        return int.from_bytes(text_digest, "big")
    origin = json.dumps([domain, split]).encode()
    return int.from_bytes(hashlib.blake2b(text_digest + origin, digest_size=32).digest(), "big")


class _Runs:
    """Collects documents and writes them sorted."""

    def __init__(self, folder: Path, split: str | None) -> None:
        self.folder, self.split = folder, split
        self.documents = self.bytes = self.runs = self.source = 0
        self.domains: dict[str, int] = {}
        self._texts: list[bytes] = []
        self._digests: list[bytes] = []
        self._domains: list[int] = []
        self._held = 0

    def add(self, text: str, domain: str | None) -> None:
        text_digest, raw = digest(text), text.encode()
        self.source = (self.source + contribution(text_digest, domain, self.split)) % 2**256
        self._texts.append(raw)
        self._digests.append(text_digest)
        self._domains.append(-1 if domain is None else self.domains.setdefault(domain, len(self.domains)))
        self.documents += 1
        self.bytes += len(raw)
        self._held += len(raw)
        if self._held >= RUN_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._texts:
            return
        index = np.empty(len(self._texts), dtype=INDEX)
        keys = np.frombuffer(b"".join(self._digests), dtype=">u8").reshape(-1, 4)
        for number, name in enumerate(("position", "key0", "key1", "key2")):
            index[name] = keys[:, number]
        index["row"] = np.arange(self.documents - len(self._texts), self.documents)
        index["domain"] = self._domains
        index["bytes"] = [len(text) for text in self._texts]
        order = np.lexsort((index["key2"], index["key1"], index["key0"]))
        index = index[order]
        index["offset"] = np.cumsum(index["bytes"]) - index["bytes"]
        with (self.folder / f"{self.runs}.text").open("wb") as file:
            file.writelines(self._texts[number] for number in order)
        np.save(self.folder / f"{self.runs}.index.npy", index)
        np.save(self.folder / f"{self.runs}.keys.npy", index["key0"])  # apart: each bucket searches it
        self.runs += 1
        self._texts, self._digests, self._domains, self._held = [], [], [], 0


def _by_row(folder: Path, record: dict[str, Any]) -> np.ndarray:
    """The index of a unit's documents in the order in which they were read. Only the unit at the end of a part needs it."""
    runs = [np.load(folder / f"{run}.index.npy") for run in range(record["runs"])]
    index = np.concatenate([np.empty(0, dtype=INDEX), *runs])
    return index[np.argsort(index["row"])]


def rows_within(
    cfg: CorpusConfig, folder: Path, record: dict[str, Any], n_documents: int, n_bytes: int
) -> tuple[int, int]:
    """How many of a unit's documents, and bytes, still fit into the part that the config asks for, when so many documents
    and bytes came before."""
    rows, size = record["documents"], record["bytes"]
    most, most_bytes = cfg.max_documents, cfg.max_bytes
    if (most is None or n_documents + rows <= most) and (most_bytes is None or n_bytes + size <= most_bytes):
        return rows, size
    totals = np.cumsum(_by_row(folder, record)["bytes"])
    kept = rows if most is None else max(0, min(rows, most - n_documents))
    if most_bytes is not None:
        kept = min(kept, int(np.searchsorted(totals, most_bytes - n_bytes, "right")))
    return kept, int(totals[kept - 1]) if kept else 0


def contribution_of_rows(folder: Path, record: dict[str, Any], split: str | None, rows: int) -> int:
    """The part of the corpus' hash of a unit's first documents."""
    index = _by_row(folder, record)[:rows]
    keys = np.stack([index[name] for name in ("position", "key0", "key1", "key2")], axis=1).astype(">u8")
    names = [*record["domains"], None]
    return (
        sum(contribution(key.tobytes(), names[row["domain"]], split) for key, row in zip(keys, index, strict=True))
        % 2**256
    )
