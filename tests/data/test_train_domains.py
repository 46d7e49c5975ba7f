"""From a column that names domains to losses by domain in the record of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from runs.folder import read_json
from tests.runs.commands import folders, train

ALPHABETS = {"even": "a", "odd": "bcdefghijklmnopqrstuvwxyz"}


@pytest.mark.slow
def test_a_run_splits_its_losses_by_domain(tmp_path: Path) -> None:
    """One domain repeats a letter, the other is noise: which is which shows in the figures."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(400):
        name = ("even", "odd")[number % 3 > 0]  # shares of their own, so that a mean of means is wrong
        letters = rng.choice(list(ALPHABETS[name]), size=rng.integers(20, 80))
        rows.append({"body": "".join(letters) + f" {number}", "meta": {"source": name}})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    train(
        tmp_path,
        "mixer=swa",
        "logger=none",
        "steps=60",
        "optimizer.lr=1e-2",
        "data=files",
        f"data.paths=[{file}]",
        "data.text=body",
        "data.domain=meta.source",
        "data.val_fraction=0.2",
        "data.test_fraction=0.2",
        "evaluation.every=0",
        "evaluation.val_tokens=null",
        "evaluation.test_tokens=null",
        f"paths.cache={tmp_path / 'cache'}",
    )
    (folder,) = folders(tmp_path)
    metrics = read_json(folder / "run.json")["metrics"]
    (corpus,) = {path.parent for path in (tmp_path / "cache").glob("*/manifest.json")}
    for split in ("val", "test"):
        tokens = np.fromfile(corpus / f"{split}.bin", dtype=np.uint16)
        texts = [
            "".join(map(chr, part[1:])) for part in np.split(tokens, np.load(corpus / f"{split}_documents.npy"))[1:]
        ]
        n_bytes = {name: sum(len(text) for text in texts if text[0] in ALPHABETS[name]) for name in ALPHABETS}
        found = {name: metrics[f"{split}/bits_per_byte/domain={name}"] for name in n_bytes}
        assert len([key for key in metrics if key.startswith(f"{split}/") and "domain=" in key]) == 2
        together = sum(found[name] * n_bytes[name] for name in found) / sum(n_bytes.values())
        assert together == pytest.approx(metrics[f"{split}/bits_per_byte"], rel=1e-6)
        assert found["even"] + 1 < found["odd"]
