"""Whole command lines at a size of seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from runs.folder import read_json, read_rows
from runs.steps import CLOCKS

ROOT = Path(__file__).resolve().parents[2]

TINY = (
    "model.d_model=16",
    "model.n_heads=2",
    "model.n_layers=1",
    "data.seq_len=32",
    "global_batch=4",
    "steps=12",
    "schedule.warmup_steps=2",
    "evaluation.every=5",
    "evaluation.val_tokens=512",
    "evaluation.test_tokens=512",
    "trainer.threads=1",
    "trainer.log_every=1",
    "trainer.progress=false",
)


def command(results: Path, *overrides: str, script: str = "train.py") -> list[str]:
    """The command line of a tiny run; data is prepared once, in the project's cache."""
    flags = [word for word in overrides if word.startswith("-")]
    values = [word for word in overrides if not word.startswith("-")]
    return [sys.executable, str(ROOT / script), *flags, *TINY, f"paths.results={results}", *values]


def environment() -> dict[str, str]:
    """Without what a surrounding test run or job may have set."""
    drop = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "SLURM_PROCID", "HYDRA_FULL_ERROR")
    return {k: v for k, v in os.environ.items() if k not in drop} | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(results: Path, *overrides: str, code: int = 0) -> subprocess.CompletedProcess:
    """Run and check the exit code."""
    done = subprocess.run(
        command(results, *overrides), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def folders(results: Path) -> list[Path]:
    """All run folders."""
    return sorted(path.parent for path in (results / "runs").glob("*/*/status.json"))


def outcome(folder: Path) -> tuple[str, dict, list[dict]]:
    """What must be equal bit by bit: weights, final metrics, and the rows without their clocks."""
    record = read_json(folder / "run.json")
    rows = [{k: v for k, v in row.items() if k not in CLOCKS} for row in read_rows(folder / "metrics.jsonl")]
    return record["weights"], record["metrics"], rows
