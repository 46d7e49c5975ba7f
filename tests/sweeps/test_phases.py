"""Running a study: with a launcher that only writes folders, and once for real."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus

from runs.cli import study_rows
from runs.folder import RunFolder, read_json, write_atomic
from runs.run import STOPPED
from runs.validate import ConfigError
from sweeps import slurm
from sweeps.jobs import Job, Locator, Run, Selection
from sweeps.phases import Following, conduct
from sweeps.slurm import Queued
from sweeps.study import Study
from sweeps.submit import note_job
from tests.runs.commands import ROOT, environment, folders, outcome, train

STUDY = Study.parse(
    {
        "name": "made_up",
        "mixers": {"swa": {"optimizer.lr": [1, 2, 3]}, "mesa": {"optimizer.lr": [1, 2, 3]}},
        "tune": {"seeds": [100, 101]},
        "seeds": [0, 1],
    }
)


class Bench:
    """Folders named by their jobs; a launcher that pretends to train, and what it was asked for."""

    def __init__(self, results: Path, study: Study = STUDY):
        self.results, self.study = results, study
        self.launched: list[list[str]] = []
        self.failing: set[str] = set()
        self.selection = Selection(list(study.mixers), list(study.seeds), ["study=made_up"])

    def path(self, name: str) -> Path:
        return self.results / "runs" / "made_up" / name

    def locate(self, job: Job) -> Run:
        return Run(job, RunFolder(self.path("-".join([job.mixer, *map(str, job.point.values()), str(job.seed)]))))

    def finish(self, name: str, **status: Any) -> None:
        """Leave a folder as a run does; the validation metric is best for a learning rate of 2."""
        lr = float(name.split("-")[1])
        self.path(name).mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(name) / "run.json", json.dumps({"metrics": {"val/bits_per_byte": (lr - 2) ** 2}}))
        state = {"state": "failed", "error": "ValueError: on purpose"} if name in self.failing else {"state": "done"}
        write_atomic(self.path(name) / "status.json", json.dumps({**state, **status}))

    def launch(self, jobs: list[list[str]], first: int) -> list[JobReturn]:
        names = ["-".join(part.split("=")[1] for part in job[1:-1]) for job in jobs]
        self.launched.append(names)
        for name in names:
            self.finish(name)
        return []

    def conduct(self, **changes: Any) -> int:
        """The exit code."""
        launch = changes.pop("launch", self.launch)
        try:
            conduct(self.study, self.selection, Folders(self), launch, self.results, **changes)
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    def record(self) -> dict[str, Any]:
        return read_json(self.path("study.json"))


class Folders(Locator):
    """Composes nothing."""

    def __init__(self, bench: Bench):
        super().__init__("made_up", bench.selection.common, lambda overrides: pytest.fail("composed"))
        self.bench = bench

    def __call__(self, job: Job) -> Run:
        return self.bench.locate(job)


@pytest.fixture
def bench(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    return Bench(tmp_path)


def test_tune_then_seeds_then_nothing(bench, caplog):
    assert bench.conduct() == 0
    tuning, final = bench.launched
    assert len(tuning) == 2 * 3 * 2
    assert final == ["swa-2-0", "swa-2-1", "mesa-2-0", "mesa-2-1"]
    assert caplog.messages[-1] == "study made_up: 16 done"
    caplog.clear()
    assert bench.conduct() == 0
    assert len(bench.launched) == 2
    assert "tune: 12 runs, 12 done, 0 to launch" in caplog.messages


def test_the_record(bench):
    bench.failing = {"swa-3-100", "mesa-2-1"}
    bench.conduct()
    record = bench.record()
    assert record["spec"] == json.loads(json.dumps(STUDY.plain()))
    assert record["phases"] == {"tune": {"done": 11, "failed": 1}, "seeds": {"done": 3, "failed": 1}}
    swa = record["mixers"]["swa"]
    assert swa["point"] == {"optimizer.lr": 2} and swa["at_edge"] == {}
    assert swa["trials"][2] == {
        "point": {"optimizer.lr": 2},
        "seed": 100,
        "run": "swa-2-100",
        "state": "done",
        "value": 0.0,
    }
    assert swa["trials"][4]["value"] is None
    assert record["mixers"]["mesa"]["runs"] == [
        {"seed": 0, "run": "mesa-2-0", "state": "done"},
        {"seed": 1, "run": "mesa-2-1", "state": "failed"},
    ]


def test_a_failing_run_stops_nothing_else_and_is_tried_again(bench, caplog):
    bench.failing = {"swa-2-0"}
    assert bench.conduct() == 1
    assert "failed  swa-2-0 (mixer=swa optimizer.lr=2 seed=0): ValueError: on purpose" in caplog.messages
    assert caplog.messages[-1].startswith("study made_up: 15 done, 1 failed")
    bench.failing = set()
    assert bench.conduct() == 0
    assert bench.launched[-1] == ["swa-2-0"]


def test_a_mixer_whose_trials_all_failed_is_left_out_of_the_second_phase(bench, caplog):
    bench.failing = {f"swa-{lr}-{seed}" for lr in (1, 2, 3) for seed in (100, 101)}
    assert bench.conduct() == 1
    assert bench.launched[-1] == ["mesa-2-0", "mesa-2-1"]
    assert "no point chosen for swa" in caplog.messages[-1]
    assert bench.record()["mixers"]["swa"]["point"] is None


def test_nothing_is_chosen_while_a_trial_runs_elsewhere(bench, caplog):
    other = RunFolder(bench.path("swa-1-100"))
    other.lock()
    other.set_status(state="running")
    try:
        assert bench.conduct() == 1
    finally:
        other.release()
    assert "tune: 12 runs, 0 done, 1 running in another process, 11 to launch" in caplog.messages
    assert "swa-1-100" not in bench.launched[0]
    assert bench.launched[1] == ["mesa-2-0", "mesa-2-1"]
    assert bench.conduct() == 0, "its process is gone: lost, and so run again"
    assert bench.launched[2] == ["swa-1-100"]


def test_narrowed_commands_add_up(bench):
    for mixer in STUDY.mixers:
        bench.selection = Selection([mixer], [1], ["study=made_up"])
        assert bench.conduct() == 0
    assert [names[-1] for names in bench.launched] == ["swa-3-101", "swa-2-1", "mesa-3-101", "mesa-2-1"]
    record = bench.record()
    assert [entry["point"] for entry in record["mixers"].values()] == [{"optimizer.lr": 2}] * 2
    assert [row["state"] for row in record["mixers"]["swa"]["runs"]] == ["missing", "done"]


def test_what_is_wrong_with_a_mixer_stops_only_those_who_ask_for_it(bench, caplog):
    def locate(job: Job, of: Any = bench.locate) -> Run:
        if job.mixer == "mesa":
            raise ConfigError("mesa is not ready")
        return of(job)

    bench.locate = locate
    with pytest.raises(ConfigError, match="not ready"):
        bench.conduct()
    assert not bench.launched
    bench.selection = Selection(["swa"], [0, 1], ["study=made_up"])
    assert bench.conduct() == 0
    assert any("mesa is not ready" in message for message in caplog.messages)


def test_dry_runs_launch_and_write_nothing(bench, caplog):
    assert bench.conduct(dry=True) == 0
    assert not bench.launched and not list(bench.results.iterdir())
    assert any("swa-1-100" in message and "study.phase=tune" in message for message in caplog.messages)


@pytest.mark.parametrize("stop", [SystemExit(STOPPED), KeyboardInterrupt()])
def test_a_signal_stops_the_study_and_the_same_command_continues_it(bench, caplog, stop):
    def launch(jobs: list[list[str]], first: int) -> list[JobReturn]:
        bench.launch(jobs[:5], first)
        raise stop

    assert bench.conduct(launch=launch) == STOPPED
    assert "the same command continues it" in caplog.messages[-1]
    assert bench.conduct() == 0
    assert len(bench.launched[1]) == 7


def test_a_launcher_that_started_nothing_is_fatal(bench):
    def launch(jobs: list[list[str]], first: int) -> list[JobReturn]:
        raise OSError("no such partition")

    with pytest.raises(OSError, match="partition"):
        bench.conduct(launch=launch)


def test_a_launcher_that_dies_later_is_not(bench, caplog):
    def launch(jobs: list[list[str]], first: int) -> list[JobReturn]:
        bench.launch(jobs[:5], first)
        raise OSError("a worker was killed")

    assert bench.conduct(launch=launch) == 1
    assert any("a worker was killed" in message for message in caplog.messages)
    assert "7 missing" in caplog.messages[-1]


def test_runs_that_ended_before_they_had_a_folder_say_why(bench, caplog):
    def launch(jobs: list[list[str]], first: int) -> list[JobReturn]:
        out = JobReturn(status=JobStatus.FAILED)
        out.return_value = ConfigError("not in a multirun")
        return [out for _ in jobs]

    assert bench.conduct(launch=launch) == 1
    assert any(message.startswith("missing  ") and "not in a multirun" in message for message in caplog.messages)


def test_a_metric_that_no_run_has(bench):
    study = Study.parse({**STUDY.plain(), "tune": {"seeds": [100], "metric": "val/accuracy"}})
    with pytest.raises(ConfigError, match=r"study.tune.metric=val/accuracy.*val/bits_per_byte"):
        Bench(bench.results, study).conduct()


# ---- launchers that submit and return -------------------------------------------------------------------------------


class Cluster:
    """A launcher that only queues; `run` then ends all queued jobs, and `go_on` is the job that repeats the command."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, retries: int = 1):
        self.bench, self.retries = bench, retries
        self.queue: dict[str, Queued] = {}
        self.names: dict[str, str] = {}  # of the runs, by job
        self.following: list[tuple[list[str], str, int]] = []
        monkeypatch.setattr(slurm, "is_here", lambda: True)
        monkeypatch.setattr(slurm, "queue", lambda: self.queue)

    def launch(self, jobs: list[list[str]], first: int) -> list[JobReturn]:
        names = ["-".join(part.split("=")[1] for part in job[1:-1]) for job in jobs]
        self.bench.launched.append(names)
        for name in names:
            job = f"{len(self.names)}_0"
            self.names[job] = name
            self.queue[job] = Queued("PENDING", "Resources", "isomix")
            note_job(self.bench.path(name), job, self.bench.path(name) / "job.log")
        return []

    def follow(self, jobs: list[str], after: str, tries: int) -> str:
        self.following.append((jobs, after, tries))
        return "77"

    def command(self, after: str | None = None, tries: int = 0) -> int:
        following = Following(self.follow, self.retries, after, tries)
        return self.bench.conduct(launch=self.launch, following=following)

    def run(self) -> None:
        for job in list(self.queue):
            self.bench.finish(self.names[job], heartbeat=time.time())
            del self.queue[job]

    def go_on(self) -> int:
        """What the last submitted following job does. Its exit code."""
        _, after, tries = self.following[-1]
        return self.command(after, tries)


@pytest.fixture
def cluster(bench, monkeypatch):
    return Cluster(bench, monkeypatch)


def test_a_launcher_that_returns_is_followed_until_the_study_is_done(cluster, bench, caplog):
    assert cluster.command() == 0
    assert "12 queued, no point chosen for swa, mesa; job 77 goes on" in caplog.messages[-1]
    assert cluster.following == [(list(cluster.queue), "tune", 0)] and len(cluster.queue) == 12
    assert bench.record()["phases"]["tune"] == {"queued": 12}
    assert cluster.command() == 0 and len(bench.launched) == 1, "what is queued is not submitted again"
    cluster.run()
    assert cluster.go_on() == 0
    assert bench.launched[1] == ["swa-2-0", "swa-2-1", "mesa-2-0", "mesa-2-1"]
    assert cluster.following[-1] == (list(cluster.queue), "seeds", 0)
    cluster.run()
    assert cluster.go_on() == 0
    assert caplog.messages[-1] == "study made_up: 16 done"
    assert bench.record()["phases"] == {"tune": {"done": 12}, "seeds": {"done": 4}}
    assert len(cluster.following) == 3 and len(bench.launched) == 2


def test_what_fails_is_tried_again_so_often_and_then_left(cluster, bench, caplog):
    bench.failing = {"swa-2-100", "mesa-2-0"}
    assert cluster.command() == 0
    cluster.run()
    assert cluster.go_on() == 0
    assert bench.launched[1:] == [["swa-2-100"], ["mesa-2-0", "mesa-2-1"]], "the other mixer need not wait"
    assert cluster.following[-1][1:] == ("tune", 1)
    cluster.run()
    assert cluster.go_on() == 0
    assert bench.launched[3:] == [["swa-1-0", "swa-1-1", "mesa-2-0"]], "a point with a failed seed is out"
    assert cluster.following[-1][1:] == ("seeds", 0)
    cluster.run()
    assert cluster.go_on() == 0
    assert bench.launched[4:] == [["mesa-2-0"]] and cluster.following[-1][1:] == ("seeds", 1)
    cluster.run()
    follows = len(cluster.following)
    assert cluster.go_on() == 1
    assert len(cluster.following) == follows and len(bench.launched) == 5
    assert "14 done, 2 failed" in caplog.messages[-1]
    assert cluster.command() == 0 and bench.launched[5] == ["swa-2-100"], "a person may try as often as they like"


def test_what_would_fail_again_is_not_tried_by_itself(cluster, bench):
    assert cluster.command() == 0
    cluster.run()
    bench.finish("swa-3-100", state="failed", error="NotFinite: loss is nan at step 3")
    assert cluster.go_on() == 0
    assert bench.launched[1] == ["swa-2-0", "swa-2-1", "mesa-2-0", "mesa-2-1"]


def test_where_jobs_may_not_submit_the_same_command_goes_on(cluster, bench, caplog):
    following = Following(None)
    assert bench.conduct(launch=cluster.launch, following=following) == 0
    assert "12 queued" in caplog.messages[-1] and "the same command goes on" in caplog.messages[-1]
    assert bench.conduct(launch=cluster.launch, following=following) == 0 and len(bench.launched) == 1
    cluster.run()
    assert bench.conduct(launch=cluster.launch, following=following) == 0
    cluster.run()
    assert bench.conduct(launch=cluster.launch, following=following) == 0
    assert caplog.messages[-1] == "study made_up: 16 done"


def test_the_record_and_the_command_are_there_from_the_first_moment_on(bench):
    seen = []

    def launch(jobs: list[list[str]], first: int) -> list[JobReturn]:
        seen.append((bench.record()["phases"], read_json(bench.path("command.json"))["overrides"]))
        return bench.launch(jobs, first)

    assert bench.conduct(launch=launch, command=["study=made_up", "steps=5"]) == 0
    assert seen[0] == ({"tune": {"missing": 12}, "seeds": {}}, ["study=made_up", "steps=5"])


# ---- whole commands --------------------------------------------------------------------------------------------------

FILE = """
shared: {model: tiny, steps: 3}
mixers:
  gated_deltanet: {optimizer.lr: [1e-3, 3e-3]}
  gated_deltanet_native: {optimizer.lr: [1e-3, 1e30]}     # not finite after the first step
tune: {seeds: [100]}
seeds: [0]
"""


@pytest.mark.slow
def test_a_study_from_a_folder_of_ones_own(tmp_path):
    (tmp_path / "mine.yaml").write_text(FILE)
    tiny = (
        "data.seq_len=16",
        "steps=3",
        "global_batch=2",
        "schedule.warmup_steps=1",
        "logger=none",
        "trainer.eval_batch=2",
    )
    small = (
        "evaluation.val_tokens=32",
        "evaluation.test_tokens=32",
        "hydra.searchpath=[sweeps://" + str(tmp_path) + "]",
    )
    results = tmp_path / "results"
    first = train(results, "study=mine", *tiny, *small, code=1).stdout
    assert "seeds: 2 runs, 0 done, 2 to launch" in first
    assert first.count("failed  gated_deltanet_native-") == 1 and "NotFinite" in first
    assert "study mine: 5 done, 1 failed" in first.splitlines()[-1]
    record = read_json(results / "runs" / "mine" / "study.json")
    assert record["mixers"]["gated_deltanet_native"]["point"] == {"optimizer.lr": 0.001}

    again = train(results, "study=mine", *tiny, *small, code=1).stdout
    assert "tune: 4 runs, 3 done, 1 to launch" in again and "seeds: 2 runs, 2 done, 0 to launch" in again
    narrowed = train(results, "study=mine", "mixer=gated_deltanet", *tiny, *small, "-m").stdout
    assert "study mine: 3 done" in narrowed.splitlines()[-1]

    alone = ("hydra.mode=RUN", "study.phase=seeds", "mixer=gated_deltanet", "optimizer.lr=0.003", "seed=0")
    assert "finished: skipped" in train(results, "study=mine", *alone, *tiny, *small).stdout


@pytest.mark.slow
def test_the_config_of_a_study_is_shown_without_importing_torch():
    program = """
import runpy, sys
sys.argv = ["train.py", "--cfg", "job", "study=quickstart"]
runpy.run_path("train.py", run_name="__main__")
assert "torch" not in sys.modules
"""
    arguments = [sys.executable, "-c", program]
    shown = subprocess.run(arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True).stdout
    assert "name: quickstart" in shown and "phase: null" in shown


@pytest.mark.slow
def test_errors_of_whole_commands(tmp_path):
    for overrides, words in {
        ("study=nosuch",): ["study=nosuch", "quickstart"],
        ("study=quickstart", "hydra.mode=RUN"): ["is not one run", "python train.py study=quickstart"],
        ("study=quickstart", "steps=1,2"): ["steps=1,2", "only mixer= and seed="],
        ("study=quickstart,quickstart", "-m"): ["is not one run"],
    }.items():
        done = train(tmp_path / "results", "mixer=gated_deltanet", *overrides, code=1)
        for word in words:
            assert word in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    done = train(tmp_path / "results", "study=parity", "mixer=mesa_sined", code=1)
    assert "mixer=mesa_sined is not in study parity. Its mixers: transformer, " in done.stdout + done.stderr
    assert not (tmp_path / "results" / "runs").exists()


def test_a_row_that_is_no_mixer_narrows_its_study():
    assert study_rows(["study=parity", "mixer=mesa_signed", "seed=0"]) == [
        "study=parity",
        "mixer=choice(mesa_signed)",
        "seed=0",
    ]
    for words in (["study=parity", "mixer=mesa"], ["mixer=mesa_signed"], ["study=parity", "mixer=mesa_signed,slstm"]):
        assert study_rows(words) == words


@pytest.mark.slow
def test_side_by_side_with_joblib_it_is_the_same(tmp_path):
    (tmp_path / "mine.yaml").write_text(FILE.replace("1e30", "3e-3"))
    size = (
        "model.d_model=16",
        "data.seq_len=16",
        "global_batch=2",
        "schedule.warmup_steps=1",
        "logger=none",
        "steps=3",
        "trainer.threads=1",
    )
    small = ("evaluation.val_tokens=32", "evaluation.test_tokens=32", f"hydra.searchpath=[sweeps://{tmp_path}]")
    outcomes = []
    for launcher in (("hydra/launcher=basic",), ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")):
        results = tmp_path / launcher[0].partition("=")[2]
        assert "study mine: 6 done" in train(results, "study=mine", *size, *small, *launcher).stdout
        outcomes.append({folder.name: outcome(folder) for folder in folders(results)})
    assert outcomes[0] == outcomes[1] and len(outcomes[0]) == 6
