"""Runs as plain records, read from their folders or from a report's compact copies. No torch, no W&B.

A run folder holds ``run.json``, ``status.json``, ``metrics.jsonl`` and, once finished, ``test_documents.npz``
(`runs.run`). A compact record is one JSON file with the same content, thinned: enough to make the report again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from runs.folder import HEARTBEAT_SECONDS, read_json, read_rows
from runs.identity import SEEDS, flatten

COMPACT_FORMAT = 1
CURVE_POINTS = 120
PRIVATE = ("hostname", "host")
"""Parts of run.json that a published record leaves out: they name machines and say nothing about the result."""


class CollectError(ValueError):
    """One sentence: what was looked for, where, and what to do."""


@dataclass(frozen=True)
class Run:
    """One run, whatever state it is in."""

    path: Path
    record: dict[str, Any]
    status: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    document_nats: np.ndarray | None = None  # (n_documents,) float64
    document_bytes: np.ndarray | None = None  # (n_documents,) int64

    @property
    def mixer(self) -> str:
        return self.record["mixer"]

    @property
    def run_id(self) -> str:
        return self.record["run_id"]

    @property
    def name(self) -> str:
        return f"{self.mixer}-{self.run_id}"

    @property
    def state(self) -> str:
        """The status, where a running one that gave no sign of life for a minute is ``lost``."""
        state = self.status.get("state", "queued")
        if state == "running" and time.time() - self.status.get("heartbeat", 0) > 6 * HEARTBEAT_SECONDS:
            return "lost"
        return state

    @property
    def done(self) -> bool:
        return self.state == "done" and bool(self.metrics)

    @property
    def metrics(self) -> dict[str, float]:
        return self.record.get("metrics", {})

    @property
    def counts(self) -> dict[str, float]:
        return self.record.get("counts", {})

    @cached_property
    def science(self) -> dict[str, Any]:
        """Flat, with dotted keys."""
        return flatten(self.record["science"])

    @property
    def comparison(self) -> dict[str, Any]:
        """What must be equal to compare: flat; mixer left out, seeds and tuned keys replaced."""
        return self.record["comparison"]

    @property
    def seeds(self) -> tuple[Any, Any]:
        """(init_seed, data_seed): runs of two mixers with equal ones are a pair."""
        return self.science["init_seed"], self.science["data_seed"]

    def point(self, keys: Iterable[str]) -> tuple[tuple[str, Any], ...]:
        """The run's values of ``keys``, in their order, leaving out seeds."""
        return tuple((key, self.science.get(key)) for key in keys if key not in SEEDS)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_run(path: Path) -> Run:
    """A run folder. Raises CollectError, naming the folder, if it is none or its run.json is damaged."""
    if not path.is_dir():
        raise CollectError(f"{path}: no such folder")
    try:
        record = read_json(path / "run.json")
    except json.JSONDecodeError as error:
        raise CollectError(f"{path / 'run.json'}: damaged ({error})") from None
    if not record:
        raise CollectError(f"{path}: not a run folder: no run.json in it. They are results/runs/<study>/<mixer>-<id>")
    _complete(record, path)
    nats = n_bytes = None
    documents = path / "test_documents.npz"
    if documents.exists():
        with np.load(documents) as found:
            nats, n_bytes = found["nats"].astype(np.float64), found["bytes"].astype(np.int64)
    return Run(path, record, read_json(path / "status.json"), read_rows(path / "metrics.jsonl"), nats, n_bytes)


def _complete(record: dict[str, Any], path: Path) -> None:
    lacking = [key for key in ("run_id", "mixer", "science", "comparison") if key not in record]
    if lacking:
        raise CollectError(f"{path}: not a run's record: it lacks {', '.join(lacking)}")


def read_compact(path: Path) -> Run:
    """A compact record, as `compact` writes it."""
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CollectError(f"{path}: damaged ({error})") from None
    if content.get("format") != COMPACT_FORMAT:
        raise CollectError(f"{path}: not a compact record of a run (format {COMPACT_FORMAT})")
    _complete(content["record"], path)
    documents = content.get("test_documents")
    return Run(
        path,
        content["record"],
        content["status"],
        content["rows"],
        None if documents is None else np.array(documents["nats"], dtype=np.float64),
        None if documents is None else np.array(documents["bytes"], dtype=np.int64),
    )


def read_any(path: Path) -> Run:
    """A run folder or a compact record."""
    return read_compact(path) if path.suffix == ".json" and path.is_file() else read_run(path)


def study_folder(results: Path, study: str) -> Path:
    """Where a study's full runs are."""
    return results / "runs" / study


def compact_folder(results: Path, study: str) -> Path:
    """Where a study's compact records are: committed with the report."""
    return results / study / "runs"


def collect(results: Path, study: str) -> tuple[list[Run], bool]:
    """All runs of a study by name, and whether they come from full run folders.

    Without run folders, as in a fresh clone, the compact records beside the report are read. Raises CollectError if
    there are neither.
    """
    full, small = study_folder(results, study), compact_folder(results, study)
    folders = sorted(p.parent for p in full.glob("*/run.json"))
    if folders:
        return [read_run(p) for p in folders], True
    records = sorted(small.glob("*.json"))
    if records:
        return [read_compact(p) for p in records], False
    known = sorted({p.parent.parent.name for p in (results / "runs").glob("*/*/run.json")})
    hint = f" Studies with runs: {', '.join(known)}." if known else ""
    how = "python train.py" if study == "default" else f"python train.py study={study}"
    raise CollectError(f"study={study}: no runs under {full} or {small}.{hint} To make them: {how}")


# ---- writing compact records -----------------------------------------------------------------------------------------


def compact(run: Run, *, bulk: bool = True) -> dict[str, Any]:
    """The run as one small JSON value. ``bulk=False`` leaves out curves and documents: enough for a tuning run."""
    record = {key: value for key, value in run.record.items() if key not in PRIVATE}
    status = {key: run.status[key] for key in ("state", "step", "steps", "error", "attempts") if key in run.status}
    status["state"] = run.state
    out: dict[str, Any] = {"format": COMPACT_FORMAT, "record": record, "status": status, "rows": []}
    if bulk:
        out["rows"] = [{k: _short(v) for k, v in row.items()} for row in thinned(run.rows)]
        if run.document_nats is not None and run.document_bytes is not None:
            # A ten-thousandth nat of a document is far below what seeds change, and a fraction of the digits.
            nats = [round(float(x), 4) for x in run.document_nats]
            out["test_documents"] = {"nats": nats, "bytes": run.document_bytes.tolist()}
    return out


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def thinned(rows: list[dict[str, Any]], points: int = CURVE_POINTS) -> list[dict[str, Any]]:
    """At most ``points`` training rows, evenly spread, the first and the last among them, and every validation."""
    training = [row for row in rows if "train/loss" in row]
    if len(training) > points:
        chosen = np.unique(np.linspace(0, len(training) - 1, points).round().astype(int))
        training = [training[i] for i in chosen]
    kept = {id(row) for row in training}
    return [row for row in rows if id(row) in kept or "train/loss" not in row]
