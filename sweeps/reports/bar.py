"""The yardstick of a report: the 5-gram on exactly the bytes that the runs were graded on, counted on as much of the text
as the runs read (those that read most of it, where they differ).

It is kept beside the report (``yardstick.json``), so that a clone without the corpus makes the same page.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evals.ngram import yardstick
from runs.folder import read_json
from sweeps.reports.collect import CollectError, Run

FILE = "yardstick.json"


@dataclass(frozen=True)
class Bar:
    """The yardstick on the graded bytes."""

    name: str
    bits_per_byte: float
    value: float  # in the unit of the table's metric
    by_document: np.ndarray  # (n_documents,), in the unit of the table's metric times bytes
    train_bytes: int
    kept: dict[str, Any] = field(repr=False)  # what `FILE` holds


def bar_of(
    runs: list[Run], metric: str, cache: Path | None, kept: dict[str, Any] | None
) -> tuple[Bar | None, list[str]]:
    """The yardstick that ``kept`` holds, if it is of the same bytes, or else measured; without it, one sentence that says
    why. ``cache=None`` asks for none."""
    run, data = runs[0], runs[0].record["science"].get("data", {})
    if cache is None or data.get("kind") != "corpus" or run.document_bytes is None:
        return None, []
    if metric not in ("test/bits_per_byte", "test/loss"):
        return None, []
    share = _share(runs)
    found = kept if kept and kept.get("share") == share and _same_bytes(kept, run) else None
    if found is None:
        try:
            found = _measure(run, data, cache, share)
        except (OSError, ValueError, TypeError) as error:
            return None, [f"no yardstick: {error}"]
    nats, size = np.array(found["nats"], dtype=np.float64), run.document_bytes
    bits = float(nats.sum()) / math.log(2) / int(size.sum())
    scale = run.metrics[metric] / run.metrics["test/bits_per_byte"]
    return Bar(found["name"], bits, bits * scale, nats / math.log(2) * scale, found["train_bytes"], found), []


def _share(runs: list[Run]) -> float:
    """Of the train split that the runs read, 1 at most."""
    epochs = [run.record.get("data", {}).get("epochs") for run in runs]
    return min(1.0, max((float(value) for value in epochs if value), default=1.0))


def _same_bytes(kept: dict[str, Any], run: Run) -> bool:
    same_data = kept.get("data_fingerprint") == run.record.get("data", {}).get("fingerprint")
    assert run.document_bytes is not None
    return same_data and kept.get("bytes") == run.document_bytes.tolist()


def _measure(run: Run, data: dict[str, Any], cache: Path, share: float) -> dict[str, Any]:
    from data.config import CorpusConfig

    found = yardstick(CorpusConfig(**data), cache, share=share)
    assert run.document_bytes is not None
    nats = found.document_nats(run.document_bytes)
    return {
        "name": f"{found.order}-gram",
        "data_fingerprint": run.record.get("data", {}).get("fingerprint"),
        "share": share,
        "train_bytes": int(found.train_bytes),
        "bytes": run.document_bytes.tolist(),
        "nats": [float(f"{value:.7g}") for value in nats],  # as it is read back
    }


def read_kept(folder: Path) -> dict[str, Any] | None:
    """What an earlier report kept. Raises CollectError if the file is damaged."""
    try:
        return read_json(folder / FILE) or None
    except json.JSONDecodeError as error:
        raise CollectError(f"{folder / FILE}: damaged ({error})") from None
