"""python -m sweeps.sync: W&B runs rebuilt from run folders, read back from the offline files. Nothing is sent."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runs.folder import RunFolder
from runs.wandb_sink import Axes, tables, tags
from sweeps import sync
from sweeps.sync import Where, main, rebuild
from tests.runs.commands import folders, train
from tests.runs.offline_wandb import read_offline
from tests.sweeps.synthetic_runs import write_run


def read_back(folder: Path) -> dict[str, Any]:
    """The one offline run of a run folder."""
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    return read_offline(log)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_rebuilt_whole(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "swa", study="demo", record={"overrides": ["mixer=swa", "experiment=mesanet_140m"]})
    record = json.loads((folder / "run.json").read_text())
    rebuild(RunFolder(folder), Where("project", "team"))
    found = read_back(folder)
    assert found["run"] == {
        "id": f"demo-{record['run_id']}",
        "name": f"swa-{record['run_id']}",
        "group": "demo",
        "job_type": "train",
        "tags": ["swa", "model:64x2", "recipe:mesanet_140m"],
    }
    assert found["config"]["mixer_name"] == "swa" and found["config"]["optimizer.lr"] == 3e-3
    assert found["config"]["comparison_key"] == record["comparison_key"] and found["exit"] == 0
    rows = rows_of(folder)
    steps = sorted({row["step"] for row in rows})
    assert [row["_step"] for row in found["history"]] == steps
    for row in found["history"]:
        merged = {k: v for one in rows if one["step"] == row["_step"] for k, v in one.items() if k != "step"}
        assert {key: row[key] for key in merged} == pytest.approx(merged)
        assert row["train_flops"] == row["tokens"] * record["counts"]["train_flops_per_token"]
    assert found["summary"]["test/bits_per_byte"] == record["metrics"]["test/bits_per_byte"]
    assert found["summary"]["counts/state_bytes"] == record["counts"]["state_bytes"]


def test_tokens_are_the_axis_and_validation_keeps_its_best(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "swa")
    with open(folder / "metrics.jsonl", "a") as file:  # it ends worse than its best
        file.write(
            json.dumps({"step": 201, "tokens": 201 * 4096, "val/bits_per_byte": 9.0, "val/accuracy": 0.1}) + "\n"
        )
    rebuild(RunFolder(folder), Where())
    found = read_back(folder)
    assert found["metrics"]["*"][0] == "tokens"
    assert found["metrics"]["val/bits_per_byte"] == ("tokens", ["min", "last"])
    assert found["metrics"]["val/accuracy"] == ("tokens", ["max", "last"])
    best = min(row["val/bits_per_byte"] for row in rows_of(folder) if "val/bits_per_byte" in row)
    assert found["summary"]["val/bits_per_byte.min"] == pytest.approx(best)
    assert found["summary"]["val/bits_per_byte.last"] == 9.0


def test_slices_and_positions_become_tables(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "swa")
    record = json.loads((folder / "run.json").read_text())
    record["metrics"] |= {"test/accuracy/gap=16": 0.5, "test/accuracy/gap=2": 0.75, "test/accuracy": 0.6}
    record["positions"] = {"edges": [0, 1, 8], "mean": [5.0, 3.0]}
    (folder / "run.json").write_text(json.dumps(record))
    assert tables(record) == {
        "slices": (
            ["metric", "slice", "label", "value"],
            [["test/accuracy", "gap", 2, 0.75], ["test/accuracy", "gap", 16, 0.5]],
        ),
        "positions": (["from", "to", "nats_per_token"], [[0, 1, 5.0], [1, 8, 3.0]]),
    }
    offline = rebuild(RunFolder(folder), Where())
    summary = read_back(folder)["summary"]
    for name, (columns, data) in tables(record).items():
        assert summary[f"tables/{name}._type"] == "table-file"
        (file,) = (offline / "files" / "media" / "table" / "tables").glob(f"{name}_*.table.json")
        written = json.loads(file.read_text())
        assert (written["columns"], written["data"]) == (columns, data)
    assert tables(json.loads((write_run(tmp_path, "mesa") / "run.json").read_text())) == {}


def test_rebuilding_again_leaves_one_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "swa", state="failed")
    for _ in range(2):
        rebuild(RunFolder(folder), Where())
    found = read_back(folder)
    assert found["exit"] == 1 and len(found["history"]) == 20


def test_validation_rows_get_the_clock_of_the_row_before() -> None:
    axes = Axes(lambda: {"counts": {"train_flops_per_token": 10.0}})
    first = axes.add({"step": 1, "tokens": 4, "train/loss": 2.0, "seconds": 1.5})
    second = axes.add({"step": 1, "tokens": 4, "val/loss": 2.5})
    assert first == {"tokens": 4, "train/loss": 2.0, "seconds": 1.5, "train_flops": 40.0}
    assert second == {"tokens": 4, "val/loss": 2.5, "seconds": 1.5, "train_flops": 40.0}
    early = Axes(lambda: {})
    assert "train_flops" not in early.add({"step": 1, "tokens": 4})


def test_tags_have_no_recipe_where_there_is_none() -> None:
    record = {"mixer": "mesa", "science": {"model": {"d_model": 8, "n_layers": 3}}, "overrides": ["mixer=mesa"]}
    assert tags(record) == ["mesa", "model:8x3"]


@pytest.mark.slow
def test_what_a_run_logs_live_is_what_is_rebuilt(tmp_path: Path) -> None:
    """A task's run, with slices and diagnostics: the offline files of the run and of the rebuild hold the same."""
    train(
        tmp_path, "mixer=gated_deltanet", "data=mqar", "data.seq_len=64", "data.pairs=[2,4]", "data.eval_examples=40",
        "logger=wandb", "logger.diagnostics=true",
    )  # fmt: skip
    (folder,) = folders(tmp_path)
    live = read_back(folder)
    rebuild(RunFolder(folder), Where())
    again = read_back(folder)
    for one in (live, again):
        for clock in ("_timestamp", "_runtime", "_wandb.runtime"):
            one["summary"].pop(clock, None)
        one["summary"] = {k: v for k, v in one["summary"].items() if not k.endswith("artifact_path")}
        one["history"] = [
            {k: v for k, v in row.items() if k not in ("_timestamp", "_runtime")} for row in one["history"]
        ]
        one["config"] = {k: v for k, v in one["config"].items() if not k.startswith("_wandb")}
    assert live == again
    assert any(key.startswith("diagnostics/half_life") for key in live["history"][-1])
    assert live["summary"]["tables/slices.nrows"] > 2 and live["summary"]["counts/params"] > 0


# ---- the command line ------------------------------------------------------------------------------------------------


class Uploads:
    """Stands in for `wandb sync`."""

    def __init__(self, code: int = 0, said: str = ""):
        self.sent: list[Path] = []
        self.code, self.said = code, said

    def __call__(self, command: list[str], **settings: Any) -> subprocess.CompletedProcess:
        assert command[1:4] == ["-m", "wandb", "sync"] and settings["timeout"] > 0
        assert settings["stdin"] == subprocess.DEVNULL  # it must never ask
        self.sent.append(Path(command[4]))
        return subprocess.CompletedProcess(command, self.code, self.said, "")


def of(monkeypatch: pytest.MonkeyPatch, uploads: Uploads) -> Uploads:
    monkeypatch.setattr(sync.subprocess, "run", uploads)
    return uploads


def test_each_run_is_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [write_run(tmp_path, mixer, study="demo") for mixer in ("swa", "mesa")]
    uploads = of(monkeypatch, Uploads())
    words = ["study=demo", f"paths.results={tmp_path}"]
    assert main(words) == 0
    assert sorted(path.parents[1] for path in uploads.sent) == sorted(folders)
    assert main(words) == 0 and len(uploads.sent) == 2
    assert capsys.readouterr().out.count("unchanged") == 2
    with open(folders[0] / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 999, "tokens": 1, "train/loss": 1.0}) + "\n")
    assert main(words) == 0 and len(uploads.sent) == 3  # only what changed
    assert main([*words, "--again"]) == 0 and len(uploads.sent) == 5
    assert main([*words, "project=other"]) == 0 and len(uploads.sent) == 7


def test_evaluations_are_sent_as_they_are_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, "swa", study="demo")
    made = folder / "eval" / "wandb" / "offline-run-20260101_000000-demo-eval-abc"
    made.mkdir(parents=True)
    uploads = of(monkeypatch, Uploads())
    where, name = Where(), f"{folder.name} demo-eval-abc"
    assert sync.sync([RunFolder(folder)], where) == {name: "sent", folder.name: "sent"}
    assert made in uploads.sent and sync.sync([RunFolder(folder)], where)[name] == "unchanged"
    again = made.with_name("offline-run-20260102_000000-demo-eval-abc")
    made.rename(again)  # evaluated anew
    assert sync.sync([RunFolder(folder)], where) == {name: "sent", folder.name: "unchanged"}
    assert uploads.sent[-1] == again and len(uploads.sent) == 3
    assert sync.sync([RunFolder(folder)], Where(project="other"))[name] == "sent"


def test_rebuild_alone_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, "swa", study="demo")
    uploads = of(monkeypatch, Uploads())
    assert main(["study=demo", f"paths.results={tmp_path}", "--rebuild"]) == 0
    assert uploads.sent == [] and read_back(folder)["exit"] == 0


def test_a_refused_upload_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "swa", study="demo")
    of(monkeypatch, Uploads(1, "Syncing\nError: No API key configured. Use `wandb login` to log in.\n"))
    words = ["study=demo", f"paths.results={tmp_path}"]
    assert main(words) == 1
    assert "error: Error: No API key configured" in capsys.readouterr().out
    uploads = of(monkeypatch, Uploads())
    assert main(words) == 0 and len(uploads.sent) == 1


def test_without_network_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **settings: Any) -> None:
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    monkeypatch.setattr(sync.subprocess, "run", hang)
    folder = RunFolder(write_run(tmp_path, "swa"))
    (said,) = sync.sync([folder], Where(), timeout=7).values()
    assert said == "error: wandb sync did not end within timeout=7 seconds: no network, or a slow one"


def test_a_run_that_is_being_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = of(monkeypatch, Uploads())
    folder = RunFolder(write_run(tmp_path, "swa"))
    folder.lock()
    try:
        assert sync.sync([RunFolder(folder.path)], Where()) == {folder.path.name: "running"}
    finally:
        folder.release()
    assert uploads.sent == [] and not (folder.path / "wandb").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to send"),
        (["study=nothing"], "study=nothing: no runs under"),
        (["runs=[/nowhere]"], "/nowhere: not a run folder"),
        (["study=demo", "projct=x"], "projct: unknown key. Did you mean 'project'?"),
        (["study=demo", "timeout=0"], "timeout=0: must be a number of seconds above 0"),
    ],
)
def test_errors_say_what_would_be_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*words, f"paths.results={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
