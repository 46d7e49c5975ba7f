"""A transformer learns to look things up; windows that do not reach what is asked for never do.

Small forms of the commands in docs/tasks.md. The learning rates are below the default: at them each of three seeds
and more learnt its task in at most 200 steps.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runs.folder import read_json
from tests.runs.commands import ROOT, environment, folders

RUN = (
    "model=tiny",  # two layers, width 128
    "steps=250",
    "global_batch=32",
    "schedule.warmup_steps=20",
    "data.eval_examples=300",
    "evaluation.every=0",
    "trainer.threads=1",
    "trainer.progress=false",
    "logger=none",
)
# Values are at least 8 tokens back: further than two layers with windows of 4 carry anything.
MQAR = ("data=mqar", "data.pairs=[2,3]", "data.asks=4", "data.min_gap=8", "data.seq_len=40", "optimizer.lr=1e-3")
INDUCTION = ("data=induction", "data.pairs=2", "data.n_tokens=8", "data.seq_len=32", "optimizer.lr=2e-3")


def accuracy(results: Path, *settings: str) -> float:
    """On the test split, after training."""
    command = [sys.executable, str(ROOT / "train.py"), *RUN, *settings, f"paths.results={results}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = folders(results)
    found: float = read_json(folder / "run.json")["metrics"]["test/accuracy"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("task", [MQAR, INDUCTION], ids=["mqar", "induction"])
def test_a_transformer_learns_it(task: tuple[str, ...], tmp_path: Path) -> None:
    assert accuracy(tmp_path, "mixer=transformer", *task) > 0.99


@pytest.mark.slow
def test_windows_that_do_not_reach_the_values_stay_at_a_blind_guess(tmp_path: Path) -> None:
    """One in eight values; even to know which were shown would give 0.4."""
    assert accuracy(tmp_path, "mixer=swa", "mixer.window=4", *MQAR) < 0.3
