"""Evaluations as Weights & Biases runs, read back from the offline files: ids, axis, summary, tables; errors fail nothing."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import wandb

from evals import publish
from evals.names import mode_of, split
from evals.publish import Evaluation, tables
from runs.folder import read_json
from runs.schema import Logger
from tests.runs.offline_wandb import read_offline
from tests.sweeps.synthetic_runs import write_run


def result(suite: str, step: int, metrics: dict[str, float | None], **parts: Any) -> dict[str, Any]:
    """A result file's content."""
    return {
        "suite": suite,
        "settings": {"split": "test"},
        "run": "swa-1",
        "step": step,
        "modes": ["parallel"],
        "metrics": metrics,
        "reasons": {},
        "tables": {},
        **parts,
    }


PLACES = {
    "edges": [0, 1, 4],
    "mean": [5.0, 4.0],
    "so_far": [5.0, 4.25],
    "sequences": [[5.0, 4.0], [None, 4.0]],
    "each": [4.25, 4.0],  # as many as there are ranges, and no curve
    "loss": 4.25,
}


def written(folder: Path, *results: dict[str, Any]) -> list[Path]:
    (folder / "eval").mkdir(exist_ok=True)
    paths = []
    for one in results:
        paths.append(folder / "eval" / f"{one['suite']}-{one['step']}.json")
        paths[-1].write_text(json.dumps(one))
    return paths


def offline(folder: Path) -> list[dict[str, Any]]:
    """All that was written; W&B's own process writes it, and may go on after `finish`."""
    wandb.teardown(0)
    return [read_offline(path) for path in sorted((folder / "eval" / "wandb").glob("offline-run-*/*.wandb"))]


def test_names_of_metrics() -> None:
    assert split("loss") == ("loss", {})
    assert split("accuracy/length=64/depth=0.5") == ("accuracy", {"length": "64", "depth": "0.5"})
    assert split("task/shots=5/acc") == ("task/acc", {"shots": "5"})
    assert mode_of("test/teacher_forced/loss", ["teacher_forced"]) == ("teacher_forced", "test/loss")
    assert mode_of("test/loss", ["teacher_forced"]) == (None, "test/loss")


def test_the_id_is_that_of_run_suites_settings_and_steps() -> None:
    record = {"study": "demo", "run_id": "abc", "mixer": "swa"}
    base = [result("positions", 20, {"loss": 1.0}), result("perplexity", 20, {"test/loss": 1.0})]
    one = Evaluation(record, base).id
    assert one.startswith("demo-eval-") and Evaluation(record, base[::-1]).id == one
    figures = copy.deepcopy(base)
    figures[0]["metrics"]["loss"] = 2.0
    assert Evaluation(record, figures).id == one
    others = []
    for change in ({"step": 10}, {"settings": {"split": "val"}}, {"suite": "mesa"}):
        others.append(Evaluation(record, [{**base[0], **change}, base[1]]).id)
    others += [Evaluation({**record, "run_id": "abd"}, base).id, Evaluation(record, base[:1]).id]
    assert len({one, *others}) == 6


def test_what_is_more_than_a_figure_becomes_a_table() -> None:
    found = tables(
        result(
            "extrapolation",
            20,
            {"loss/length=64": 2.0, "last/length=64": 2.1, "loss/length=128": None, "plain": 1.0},
            reasons={"loss/length=128": "takes at most 64 tokens"},
            tables={
                "parallel": PLACES,
                "rows": [{"context": 64, "rate": 10.0}],
                "curves": {"a": PLACES},
                "chance": 0.1,
                "gain": {"x": {"mean": 1.0, "n": 4}},
            },
        )
    )
    assert set(found) == {"length", "parallel", "rows", "gain", "n_a"}
    assert found["gain"] == (["name", "mean", "n"], [["x", 1.0, 4]])
    assert found["length"] == (["length", "loss", "last"], [[64, 2.0, 2.1], [128, None, None]])
    assert found["parallel"] == (["from", "to", "mean", "so_far"], [[0, 1, 5.0, 5.0], [1, 4, 4.0, 4.25]])
    assert found["rows"] == (["context", "rate"], [[64, 10.0]])
    assert found["n_a"] == (["metric", "reason"], [["loss/length=128", "takes at most 64 tokens"]])


def test_a_series_is_one_run_over_tokens_and_a_repeat_doubles_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "swa", study="demo")
    record = read_json(folder / "run.json")
    files = written(
        folder,
        result("positions", 200, {"loss": 1.5, "difference": -0.25}, tables={"parallel": PLACES}),
        result("positions", 100, {"loss": 2.5, "difference": None}),
        result("perplexity", 200, {"test/loss": float("inf")}),
    )
    for _ in range(2):
        publish.publish(folder, files, Logger(project="mine"))
        wandb.teardown(0)
    (made,) = offline(folder)
    results = [json.loads(path.read_text()) for path in files]
    assert made["run"]["id"] == Evaluation(record, results).id and made["run"]["id"].startswith("demo-eval-")
    assert (made["run"]["group"], made["run"]["job_type"], made["exit"]) == ("demo", "eval", 0)
    assert made["run"]["tags"] == ["swa", "model:64x2"]
    assert made["metrics"]["*"] == ("tokens", [])
    rows = [{key: value for key, value in row.items() if key[0] != "_" or key == "_step"} for row in made["history"]]
    batch = 16 * 256
    assert rows == [
        {"_step": 100, "tokens": 100 * batch, "positions/loss": 2.5},
        {"_step": 200, "tokens": 200 * batch, "positions/loss": 1.5, "positions/difference": -0.25},
    ]
    assert made["summary"]["positions/loss"] == 1.5
    assert made["summary"]["tables/positions/parallel.nrows"] == 2
    config = made["config"]
    assert config["suite.positions.split"] == "test" and config["optimizer.lr"] == record["science"]["optimizer"]["lr"]
    assert (config["mixer_name"], config["run_id"]) == ("swa", record["run_id"])


def test_a_model_from_elsewhere_has_a_run_too(tmp_path: Path) -> None:
    name = "a-very-long-name-of-a-model-that-someone-has-put-on-a-hub-of-models-for-all"
    files = written(tmp_path, {**result("perplexity", 0, {"test/loss": 3.0}), "run": name})
    publish.publish(tmp_path, files, Logger())
    (made,) = offline(tmp_path)
    assert made["run"]["id"].startswith("external-eval-") and made["run"]["tags"] == [name[:64]]
    assert made["summary"]["perplexity/test/loss"] == 3.0


def test_errors_of_wandb_fail_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: Any) -> None:
        raise wandb.errors.CommError("no network")

    files = written(write_run(tmp_path, "swa"), result("positions", 200, {"loss": 1.5}))
    monkeypatch.setattr(wandb, "init", refuse)
    with caplog.at_level(logging.WARNING):
        publish.publish(files[0].parents[1], files, Logger(wandb="online"))
    assert "CommError: no network" in caplog.text


def test_without_a_logger_nothing_is_written(tmp_path: Path) -> None:
    files = written(tmp_path, result("positions", 200, {"loss": 1.5}))
    publish.publish(tmp_path, files, Logger(wandb="disabled"))
    assert not (tmp_path / "eval" / "wandb").exists()
