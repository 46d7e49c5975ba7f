"""What sweeps.status says of folders as launchers and jobs leave them, with a queue that is made up."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from runs.folder import RunFolder, write_atomic
from sweeps import slurm, status
from sweeps.jobs import Job, Run, states
from sweeps.slurm import Queued
from sweeps.submit import note_job

POINTS = [{"optimizer.lr": 0.001}, {"optimizer.lr": 0.003}]


class Study:
    """A study of one mixer whose runs are named by their place."""

    def __init__(self, results: Path):
        self.results = results
        self.path = results / "runs" / "made_up"

    def record(self, trials: int, runs: int) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        swa = {
            "point": POINTS[0] if runs else None,
            "trials": [{"point": POINTS[i], "seed": 100, "run": f"swa-{i}"} for i in range(trials)],
            "runs": [{"seed": seed, "run": f"swa-{seed + 10}"} for seed in range(runs)],
        }
        write_atomic(self.path / "study.json", json.dumps({"mixers": {"swa": swa}}))

    def folder(self, name: str, **facts) -> RunFolder:
        folder = RunFolder(self.path / name)
        folder.path.mkdir(parents=True, exist_ok=True)
        write_atomic(folder.path / "status.json", json.dumps({"heartbeat": time.time(), "steps": 400, **facts}))
        return folder

    def look(self) -> dict[str, status.Row]:
        rows, _ = status.look(self.results, "made_up")
        return {row.run: row for row in rows}


@pytest.fixture
def study(tmp_path):
    return Study(tmp_path)


@pytest.fixture
def queue(monkeypatch):
    """SLURM's queue, to be filled."""
    jobs: dict[str, Queued] = {}
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setattr(slurm, "queue", lambda: jobs)
    return jobs


def test_every_state_and_the_exit_code(study, queue, capsys):
    study.record(trials=2, runs=4)
    study.folder("swa-0", state="done")
    study.folder("swa-1", state="failed", error="NotFinite: loss is nan at step 3")
    study.folder("swa-10", state="running", step=5)
    study.folder("swa-11", state="preempted", step=7)
    note_job(study.path / "swa-11", "4_1", study.path / "4_1.log")
    note_job(study.path / "swa-12", "4_2", study.path / "4_2.log")
    (study.path / "4_2.log").write_text("module: command not found\nno such module: cuda\n")
    queue["4_1"] = Queued("PENDING", "BeginTime", "isomix")
    found = study.look()
    assert {name: row.state for name, row in found.items()} == {
        "swa-0": "done",
        "swa-1": "failed",
        "swa-10": "lost",
        "swa-11": "queued",
        "swa-12": "missing",
        "swa-13": "missing",
    }
    assert found["swa-12"].error == "no such module: cuda" and found["swa-13"].error is None
    assert status.main(["study=made_up", f"paths.results={study.results}"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == "study made_up: 1 done, 1 queued, 1 failed, 1 lost, 2 missing"
    assert any("failed" in line and "swa-1  optimizer.lr=0.003 seed=100: NotFinite" in line for line in told)
    assert status.main(["study=made_up", f"paths.results={study.results}", "--json"]) == 1
    assert [row["state"] for row in json.loads(capsys.readouterr().out)["runs"]].count("missing") == 2


def test_progress_and_estimate_come_from_the_runs_own_rows(study, queue):
    study.record(trials=1, runs=0)
    folder = study.folder("swa-0")
    folder.lock()
    try:
        folder.set_status(state="running", step=100)
        folder.log({"step": 110, "tokens": 1, "seconds": 55.0})
        folder.log({"step": 110, "tokens": 1, "val/loss": 2.0})
        row = study.look()["swa-0"]
    finally:
        folder.release()
    assert (row.state, row.step, row.steps) == ("running", 110, 400)
    assert row.seconds_left == pytest.approx((400 - 110) * 0.5)
    assert "step 110 of 400, 2 min left" in row.line()


def test_a_mixer_without_its_choice_is_named(study, queue, capsys):
    study.record(trials=2, runs=0)
    for name in ("swa-0", "swa-1"):
        study.folder(name, state="done")
    assert status.main(["study=made_up", f"paths.results={study.results}"]) == 0
    assert capsys.readouterr().out.endswith("study made_up: 2 done, no point chosen yet for swa\n")


def test_a_failure_counts_until_a_job_that_was_submitted_after_it_is_in_the_queue(study, queue):
    job, now = Job("tune", "swa", POINTS[0], 100), time.time()
    folder = study.folder("swa-0", state="failed", heartbeat=now - 60)
    note_job(folder.path, "5_0", folder.path / "5_0.log")
    run = Run(job, folder)
    assert states([run]) == ["failed"]
    queue["5_0"] = Queued("PENDING", "Resources", "isomix")
    assert states([run]) == ["queued"]
    queue["5_0"] = Queued("RUNNING", "node", "isomix")
    assert states([run]) == ["queued"], "its job has begun, itself not yet"
    study.folder("swa-0", state="failed", heartbeat=now + 60)
    assert states([run]) == ["failed"], "it failed again, its job is about to end"
    queue["5_0"] = Queued("PENDING", "BeginTime", "isomix")
    assert states([run]) == ["queued"], "preempted before it had ended: SLURM runs it again"


def test_a_run_on_another_node_runs_though_its_lock_is_not_seen_here(study, queue):
    folder = study.folder("swa-0", state="running", heartbeat=time.time() + 1)
    note_job(folder.path, "6_0", folder.path / "6_0.log")
    run = Run(Job("tune", "swa", POINTS[0], 100), folder)
    queue["6_0"] = Queued("RUNNING", "node", "isomix")
    assert states([run]) == ["running"]
    queue["6_0"] = Queued("PENDING", "BeginTime", "isomix")
    assert states([run]) == ["queued"]
    del queue["6_0"]
    assert states([run]) == ["lost"]


def test_slurm_is_only_asked_where_a_job_was_submitted(study, monkeypatch):
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setattr(slurm, "queue", lambda: pytest.fail("asked"))
    assert states([Run(Job("tune", "swa", POINTS[0], 100), study.folder("swa-0", state="done"))]) == ["done"]


def test_retry_repeats_the_whole_command_where_it_was_given(study, queue, monkeypatch, tmp_path):
    study.record(trials=1, runs=0)
    write_atomic(
        study.path / "command.json",
        json.dumps({"overrides": ["study=made_up", "mixer=swa", "seed=0", "steps=5"], "cwd": str(tmp_path)}),
    )
    asked = []

    def run(command, cwd, check):
        asked.append((command[2:], cwd))
        return type("Done", (), {"returncode": 3})

    monkeypatch.setattr(status.subprocess, "run", run)
    assert status.main(["study=made_up", f"paths.results={study.results}", "--retry"]) == 3
    assert asked == [(["study=made_up", "steps=5"], str(tmp_path))]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["study=NAME"]),
        (["study=nosuch"], ["study=nosuch", "never started", "made_up", "python train.py study=nosuch"]),
        (["study=made_up", "--again"], ["--again", "--retry"]),
        (["study=made_up", "--retry"], ["command.json is missing"]),
    ],
)
def test_errors(study, queue, capsys, arguments, words):
    study.record(trials=1, runs=0)
    assert status.main([*arguments, f"paths.results={study.results}"]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words), told
