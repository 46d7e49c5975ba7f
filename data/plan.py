"""Which documents a corpus has: its units, their runs, and where a part of it ends."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.config import CorpusConfig
from data.gather import Slice
from data.jobs import bar, in_order
from data.scatter import contribution_of_rows, reached, rows_within, scatter
from data.sources import Unit, units
from data.write import DOMAINS, sweep, write_json

log = logging.getLogger(__name__)

MAX_DOMAINS = int(np.iinfo(DOMAINS).max)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that tokenizing needs to know."""

    slices: list[Slice]

    domains: list[str]
    """Names, sorted."""

    source: str
    """Hex hash of the documents, whatever their order."""

    n_bytes: int


def make_plan(cfg: CorpusConfig, work: Path, *, streaming: bool, processes: int, progress: bool) -> Plan:
    """Reads the units that are not done yet. Raises ValueError for a corpus without text, and what
    ``data.sources.read`` raises."""
    found = _units(cfg, work, streaming)
    return _select(cfg, found, _scatter(cfg, found, work, streaming, processes, progress), work)


def _units(cfg: CorpusConfig, work: Path, streaming: bool) -> list[Unit]:
    """The units of this corpus. Those of a hub data set without a revision are the ones of the first attempt, so that a
    restart goes on with the same state of it."""
    if cfg.hub is None:
        return units(cfg)
    file = work / f"units-{'stream' if streaming else 'whole'}.json"
    if file.exists():
        plain = json.loads(file.read_text(encoding="utf-8"))
        return [Unit(**{**unit, "files": tuple(unit["files"]), "shard": tuple(unit["shard"])}) for unit in plain]
    found = units(cfg, streaming=streaming)
    write_json(file, [dataclasses.asdict(unit) for unit in found])
    return found


def _scatter(
    cfg: CorpusConfig, found: Sequence[Unit], work: Path, streaming: bool, processes: int, progress: bool
) -> list[dict[str, Any]]:
    """The records of units, in order; where a part of the corpus is asked for, of as many as it needs."""
    sweep(work / "units")
    records: list[dict[str, Any]] = []
    n_documents = n_bytes = 0
    for limited in (True, False):
        jobs = [(unit, _folder(work, unit)) for unit in found if unit.limited == limited]
        for done in in_order(scatter, (cfg, streaming), jobs, processes, bar("texts", len(jobs), progress)):
            records.append(done)
            n_documents += done["documents"]
            n_bytes += done["bytes"]
            if limited and reached(cfg, n_documents, n_bytes):
                break
        if limited:
            records += [{}] * (len(jobs) - len(records))  # not needed
    return records


def _folder(work: Path, unit: Unit) -> Path:
    return work / "units" / str(unit.number)


def _select(cfg: CorpusConfig, found: Sequence[Unit], records: Sequence[dict[str, Any]], work: Path) -> Plan:
    """What of the units belongs to the corpus."""
    domains = sorted({name for record in records for name in record.get("domains", ())})
    if len(domains) > MAX_DOMAINS:
        raise ValueError(
            f"data.domain={cfg.domain}: this column has {len(domains):,} different values; want one with at most "
            f"{MAX_DOMAINS:,}, such as the source of a document, or null"
        )
    place_of = {name: number for number, name in enumerate(domains)}
    slices: list[Slice] = []
    n_documents = n_bytes = source = empty = 0
    limited_documents = limited_bytes = 0
    for unit, record in zip(found, records, strict=True):
        if not record:
            continue
        folder = _folder(work, unit)
        rows, size = record["documents"], record["bytes"]
        part = int(record["source"], 16)
        if unit.limited:
            kept, kept_bytes = rows_within(cfg, folder, record, limited_documents, limited_bytes)
            if kept < rows:  # the last one: no further unit was read
                part = contribution_of_rows(folder, record, unit.split, kept)
            rows, size = kept, kept_bytes
            limited_documents, limited_bytes = limited_documents + rows, limited_bytes + size
        slices.append(
            Slice(str(folder), record["runs"], unit.split, rows, tuple(place_of[name] for name in record["domains"]))
        )
        n_documents, n_bytes, empty = n_documents + rows, n_bytes + size, empty + record["empty"]
        source = (source + part) % 2**256
    if empty:
        log.warning("data.name=%s: skipped %d empty documents beside %d with text", cfg.name, empty, n_documents)
    if not n_documents:
        where = f"data.hub={cfg.hub}" if cfg.hub else f"data.paths={list(cfg.paths)}"
        raise ValueError(f"{where}: no document has any text")
    return Plan(slices, domains, hashlib.sha256(f"{n_documents} {source:064x}".encode()).hexdigest(), n_bytes)
