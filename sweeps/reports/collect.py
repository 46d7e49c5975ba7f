"""Runs as plain records, read from their folders or from a report's compact copies. No torch, no W&B.

A run folder holds ``run.json``, ``status.json``, ``metrics.jsonl``, once finished ``test_documents.npz`` (`runs.run`),
and under ``eval/`` what suites have measured. A compact record is one JSON file with the same content, thinned: enough
to make the report again.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from runs.folder import HEARTBEAT_SECONDS, read_json, read_rows
from runs.identity import SEEDS, flatten
from sweeps.reports.results import FOLDERS, DamagedResult, Result, read_results

COMPACT_FORMAT = 1
CURVE_POINTS = 120
DIAGNOSED_POINTS = 8
"""Rows of a compact record that keep their ``diagnostics/``, of which one has hundreds."""

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
    documents: dict[str, np.ndarray] = field(default_factory=dict)  # by name, one float64 for each test document
    evals: list[Result] = field(default_factory=list)  # of suites, see `sweeps.reports.results`

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
        beat = self.status.get("heartbeat")  # a compact record has none: there it is as it was found
        if state == "running" and beat is not None and time.time() - beat > 6 * HEARTBEAT_SECONDS:
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

    def by_document(self, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(values, sizes) of each test document with sum(values) / sum(sizes) = ``metric``; None where documents do not
        carry it. Text has ``nats`` and ``bytes``; a task has ``nats`` (or squared errors), ``correct`` or ``bayes``, and
        ``graded``."""
        found = self.documents
        if not found:
            return None
        if "bytes" in found:
            bits, size = found["nats"] / math.log(2), found["bytes"]
            if metric == "test/bits_per_byte":
                return bits, size
            if metric == "test/loss" and self.metrics.get("test/bits_per_byte"):
                return bits * (self.metrics["test/loss"] / self.metrics["test/bits_per_byte"]), size
            return None
        own = {"test/loss": found["nats"]}
        if "correct" in found:
            own["test/accuracy"] = found["correct"]
        if "bayes" in found:
            own["test/excess"] = found["nats"] - found["bayes"]
        return (own[metric], found["graded"]) if metric in own else None

    @property
    def document_bytes(self) -> np.ndarray | None:
        """(n_documents,) int64, of text."""
        return self.documents["bytes"].astype(np.int64) if "bytes" in self.documents else None

    @property
    def positions(self) -> dict[str, list[float]] | None:
        """Loss by place in the text, as ``positions`` of run.json says it; None where it was not measured.

        The format, for whoever measures it: ``{"edges": [0, 1, 2, 4, 8], "mean": [5.5, 4.1, 3.2, 2.9]}``. ``mean[i]`` is
        the mean loss of the test split, in nats per token, over positions ``edges[i] <= t < edges[i + 1]``, counted in
        tokens from the start of the context. Edges are whole and grow; there is one more of them than of means.
        ``train_length`` may stand beside them. Raises CollectError for anything else.
        """
        found = self.record.get("positions")
        if found is None:
            return None
        edges, mean = found.get("edges", []), found.get("mean", [])
        grow = all(a < b for a, b in zip(edges, edges[1:], strict=False))
        if len(edges) != len(mean) + 1 or not mean or not grow or edges[0] < 0:
            raise CollectError(
                f"{self.path}: positions of {len(edges)} edges and {len(mean)} means: must be growing edges from 0, one "
                "more than means"
            )
        return found

    @property
    def match(self) -> dict[str, Any] | None:
        """What ``match=params`` and the like did to this run: ``kind``, ``reference``, ``residual`` (a share of the
        budget), ``knob`` and ``value``. None where budgets were not matched."""
        found = self.record.get("match")
        return found if found and found.get("kind", "none") != "none" else None

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
    documents: dict[str, np.ndarray] = {}
    if (path / "test_documents.npz").exists():
        with np.load(path / "test_documents.npz") as found:
            documents = {name: found[name].astype(np.float64) for name in found}
    try:
        evals = read_results(path)
    except DamagedResult as error:
        raise CollectError(str(error)) from None
    return Run(path, record, read_json(path / "status.json"), read_rows(path / "metrics.jsonl"), documents, evals)


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
    return _restored(path, content)


def _restored(path: Path, content: dict[str, Any]) -> Run:
    documents = {name: np.array(values, dtype=np.float64) for name, values in content.get("test_documents", {}).items()}
    evals = content.get("evals", [])
    return Run(path, content["record"], content["status"], content["rows"], documents, evals)


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
    """The run as one small JSON value. ``bulk=False`` leaves out curves, documents and evaluations: enough for a tuning
    run."""
    record = {key: value for key, value in run.record.items() if key not in PRIVATE}
    if record.get("command"):
        record["command"] = public_command(record["command"])
    if record.get("overrides"):
        record["overrides"] = [word for word in record["overrides"] if not is_private(word)]
    status = {key: run.status[key] for key in ("state", "step", "steps", "error", "attempts") if key in run.status}
    status["state"] = run.state
    if status.get("error"):
        status["error"] = FOLDERS.sub("", status["error"])
    out: dict[str, Any] = {"format": COMPACT_FORMAT, "record": record, "status": status, "rows": []}
    if bulk:
        out["rows"] = [{k: _short(v) for k, v in row.items()} for row in thinned(run.rows)]
        if run.documents:
            # Seven digits: far below what seeds change, and a fraction of the file.
            out["test_documents"] = {name: [_rounded(x) for x in values] for name, values in run.documents.items()}
        if run.evals:
            out["evals"] = run.evals
    return out


def settled(run: Run, *, bulk: bool = True) -> Run:
    """The run as it is read back from its compact record. Reports are made of these, so that one made from run folders
    and one made from the records in a clone are the same, byte for byte."""
    small = json.loads(json.dumps(compact(run, bulk=bulk)))
    return _restored(run.path, small)


def is_private(word: str) -> bool:
    """Does this override say where things are kept on one machine?"""
    return word.lstrip("+~").startswith(("paths.", "hydra.run", "hydra.sweep."))


def public_command(command: str) -> str:
    """A command line without what belongs to one machine: folders of programs, and where results are kept."""
    words = [word for word in shlex.split(command) if not is_private(word)]
    words = [Path(word).name if word.endswith((".py", "/python")) and "=" not in word else word for word in words]
    return shlex.join(words)


def _rounded(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(f"{value:.7g}")


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def thinned(rows: list[dict[str, Any]], points: int = CURVE_POINTS) -> list[dict[str, Any]]:
    """At most ``points`` training rows, evenly spread, the first and the last among them, and every validation."""
    training = [row for row in rows if "train/loss" in row]
    kept = {id(row) for row in _spread(training, points)}
    looked_into = [row for row in rows if any(key.startswith("diagnostics/") for key in row)]
    whole = {id(row) for row in _spread(looked_into, DIAGNOSED_POINTS)}
    return [
        row if id(row) in whole else {key: value for key, value in row.items() if not key.startswith("diagnostics/")}
        for row in rows
        if id(row) in kept or "train/loss" not in row
    ]


def _spread(rows: list[dict[str, Any]], points: int) -> list[dict[str, Any]]:
    """At most so many, evenly spread, both ends among them."""
    if len(rows) <= points:
        return rows
    return [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, points).round().astype(int))]
