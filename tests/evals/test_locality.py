"""The split into global and local tasks: the paper's rule on scores that are known, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evals.locality import FULL, Command, judge, main, split
from runs.identity import ROOT
from runs.validate import ConfigError
from sweeps.study import read

WINDOWS = ("4", "16", "64", FULL)
MIXERS = ("swa=4", "swa=16", "swa=64", "transformer")


def scores(shares: tuple[float, float, float, float], n: int = 200) -> dict[str, list[float]]:
    """Documents in one order of difficulty: of ``n`` the first share is right."""
    return {
        window: [float(i < round(share * n)) for i in range(n)] for window, share in zip(WINDOWS, shares, strict=True)
    }


def write_run(
    folder: Path, mixer: str, documents: dict[str, dict[str, list[float]]], name: str = "downstream-aa.json"
) -> Path:
    """A run's folder with results: task -> metric -> scores."""
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    kind, _, window = mixer.partition("=")
    (folder / "config.yaml").write_text(f"mixer: {{kind: {kind}, window: {window or 'null'}}}\n")
    tables = {task: [{"metrics": {}, "documents": found, "n": 0}] for task, found in documents.items()}
    (folder / "eval" / name).write_text(json.dumps({"suite": "downstream", "settings": {}, "tables": tables}))
    return folder


def study(tmp_path: Path, tasks: dict[str, dict[str, list[float]]], metric: str = "acc_per_token") -> list[Path]:
    """One run for each window; task -> window -> scores."""
    return [
        write_run(
            tmp_path / f"run{window}",
            mixer,
            {task: {"acc": [0.0] * 200, metric: found[window]} for task, found in tasks.items()},
        )
        for window, mixer in zip(WINDOWS, MIXERS, strict=True)
    ]


@pytest.mark.parametrize(
    ("shares", "verdict", "settled"),
    [
        ((0.2, 0.4, 0.6, 0.8), "global", True),
        ((0.2, 0.4, 0.8, 0.8), "global", True),  # none is better than full attention
        ((0.2, 0.4, 0.9, 0.8), "local", True),  # a small window is
        ((0.8, 0.7, 0.6, 0.8), "local", True),  # does not rise
        ((0.8, 0.8, 0.8, 0.8), "local", True),  # small windows reach everything
        ((0.0, 0.0, 0.0, 0.0), "local", False),  # nobody solves anything
        ((0.500, 0.5, 0.505, 0.6), "global", False),  # rises by one document of 200
        ((0.400, 0.5, 0.605, 0.6), "local", False),  # is better by one document
        ((0.000, 0.0, 0.500, 0.505), "global", False),  # lacks one document of full attention's
    ],
)
def test_the_rule_of_the_paper(shares: tuple, verdict: str, settled: bool) -> None:
    found = judge("task", "acc", scores(shares), [64, 4, 16])
    assert (found.verdict, found.settled) == (verdict, settled)
    assert found.scores == pytest.approx(dict(zip(WINDOWS, shares, strict=True)))
    assert found.rise["mean"] == pytest.approx(shares[2] - shares[0])
    assert found.beats["16"]["mean"] == pytest.approx(shares[1] - shares[3])


def test_intervals_are_of_pairs() -> None:
    """Half a document in a hundred that both windows agree on otherwise is seen, where two independent draws of accuracy
    near a half would not show it: their difference has a standard error of 0.05."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2, 200).astype(float)
    better = base.copy()
    better[np.flatnonzero(base == 0)[:12]] = 1
    found = judge("task", "acc", {"4": base.tolist(), "64": better.tolist(), FULL: better.tolist()}, [4, 64])
    assert found.verdict == "global" and found.settled and found.rise["low"] > 0


def test_seeds_are_averaged_and_the_metric_is_per_token(tmp_path: Path) -> None:
    tasks = {"far": scores((0.2, 0.4, 0.6, 0.8)), "near": scores((0.7, 0.7, 0.7, 0.7))}
    folders = study(tmp_path, tasks)
    second = {"far": {"acc_per_token": [1.0] * 200}, "near": {"acc_per_token": scores((0.7,) * 4)["4"]}}
    folders.append(write_run(tmp_path / "seed1", "swa=4", second))
    verdicts, without = split(folders, [4, 16, 64])
    far, near = verdicts
    assert (far.task, far.metric, near.verdict, without) == ("far", "acc_per_token", "local", [])
    assert far.scores["4"] == pytest.approx(0.6) and far.verdict == "local", (
        "the second seed's 4 lifts it above the rise"
    )
    assert list(far.scores) == list(WINDOWS)


def test_tasks_without_options_and_tasks_without_scores(tmp_path: Path) -> None:
    folders = study(tmp_path, {"cloze": scores((0.1, 0.2, 0.3, 0.4))}, metric="contains")
    verdicts, _ = split(folders, [4, 16, 64])
    assert verdicts[0].metric == "acc", "the first of those that count"
    for folder, mixer in zip(folders, MIXERS, strict=True):
        write_run(folder, mixer, {"ppl": {"perplexity": [3.0]}})
    assert split(folders, [4, 16, 64]) == ([], ["ppl"])


def test_the_study_has_the_windows_of_the_rule() -> None:
    content = read(ROOT / "sweeps" / "local_global.yaml")["study"]
    windows = [
        grid["mixer"]["window"] for name, grid in content["mixers"].items() if content["variants"].get(name) == "swa"
    ]
    assert set(Command().small) <= {window for (window,) in windows} and content["reference"] == "transformer"


def test_as_typed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    study(tmp_path / "runs", {"far": scores((0.2, 0.4, 0.6, 0.8)), "near": scores((0.7, 0.7, 0.7, 0.7))})
    (tmp_path / "runs" / "study.json").write_text("{}")  # the sweeper's
    assert main([f"runs={tmp_path}/runs/*", f"out={tmp_path}/split.json"]) == 0
    said = capsys.readouterr().out
    assert "global: far" in said and "local: near" in said
    kept = json.loads((tmp_path / "split.json").read_text())
    assert [task["verdict"] for task in kept["tasks"]] == ["global", "local"] and kept["small"] == [4, 16, 64]


def test_what_cannot_be_is_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = study(tmp_path, {"far": scores((0.2, 0.4, 0.6, 0.8))})
    with pytest.raises(ConfigError, match="there is no run with window 8; runs has 4, 16, 64, full"):
        split(folders, [4, 8])
    with pytest.raises(ConfigError, match="its mixer is mesa; the split is made with transformer and swa"):
        split([*folders, write_run(tmp_path / "mesa", "mesa", {"far": {"acc": [0.0] * 200}})], [4, 16, 64])
    with pytest.raises(ConfigError, match="no downstream results of the same settings and step in all of them"):
        split([*folders, write_run(tmp_path / "other", "swa=4", {}, "downstream-bb.json")], [4, 16, 64])
    for folder, mixer in zip(folders, MIXERS, strict=True):
        write_run(folder, mixer, {"far": {"acc": [1.0]}}, "downstream-cc.json")
    with pytest.raises(ConfigError, match="far is in several downstream results"):
        split(folders, [4, 16, 64])
    assert main([f"runs={tmp_path}/nowhere"]) == 2 and "has no downstream results" in caplog.text
    assert main(["runs=[a]", "small=[4]"]) == 2 and "small=[4]: at least two different windows" in caplog.text
