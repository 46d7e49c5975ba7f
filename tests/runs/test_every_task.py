"""Every task trains and is scored, as a user would type it: one multirun over the tasks of `conf/data/`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from data.tasks import configs
from runs.folder import read_json
from tests.runs.commands import ROOT, environment, folders

CONF = ROOT / "conf" / "data"
TASKS = {path.stem: kind for path in sorted(CONF.glob("*.yaml")) if (kind := yaml.safe_load(path.read_text())["kind"]) in configs()}  # fmt: skip
SMALL = (
    "mixer=maglev",  # two passes have most to get wrong
    "mixer.window=8",
    "model.d_model=16",
    "model.n_heads=2",
    "model.n_layers=1",
    "++data.eval_examples=20",  # Hydra checks a multirun's fixed overrides against the default corpus too
    "global_batch=4",
    "steps=4",
    "schedule.warmup_steps=0",
    "evaluation.every=0",
    "trainer.threads=1",
    "trainer.progress=false",
    "logger=none",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Records of runs by the task's config."""
    results = tmp_path_factory.mktemp("tasks")
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "-m",
        f"data={','.join(TASKS)}",
        *SMALL,
        f"paths.results={results}",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [read_json(folder / "run.json") for folder in folders(results)]
    return {record["overrides"][0].removeprefix("data="): record for record in records}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_trains_and_is_scored(finished, name):
    record = finished[name]
    metrics, kind = record["metrics"], TASKS[name]
    assert record["science"]["data"]["kind"] == kind and record["science"]["tokenizer"] is None
    wanted = {"loss", "bayes", "excess"} if kind == "regression" else {"loss", "accuracy", "accuracy_all"}
    assert {f"{prefix}/{key}" for key in wanted for prefix in ("test", "val", "test/teacher_forced")} <= metrics.keys()
    sliced = [key for key in metrics if key.startswith("test/") and "=" in key]
    assert sliced or kind == "mad_memorization", "scores are cut by slices"
    if kind != "regression":
        assert 0 <= metrics["test/accuracy"] <= 1 and metrics["test/accuracy_all"] <= metrics["test/accuracy"] + 1e-9
