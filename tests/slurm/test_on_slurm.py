"""Studies and runs on a real SLURM: preempted, failing, killed, requeued, in parallel. Each ends with the same bits."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys

import pytest
from omegaconf import OmegaConf

from runs.folder import read_json
from sweeps.report import make
from tests.runs.commands import command, folders, outcome, train
from tests.slurm.cluster import logs, trains

pytestmark = pytest.mark.slow

STUDY = """
shared: {model: tiny, steps: 150}
mixers:
  gated_deltanet: {optimizer.lr: [1e-3, 3e-3]}
  mesa: {optimizer.lr: [1e-3, 3e-3]}
  swa: {optimizer.lr: [1e-3, 3e-3]}
tune: {seeds: [100]}
seeds: [0, 1]
"""
LONG = ("steps=150", "logger=none")
TIMINGS = re.compile(r"second|tokens_per_s|timing|hardware|time|date|made|command|started|finished|hours")


def without_timings(node):
    """A report's content without what measures time or says when and how it was made."""
    if isinstance(node, dict):
        return {key: without_timings(value) for key, value in node.items() if not TIMINGS.search(key)}
    return [without_timings(value) for value in node] if isinstance(node, list) else node


def report(results):
    """The content of report.json."""
    _, content, folder = make(study="chaos", results=results, yardstick=False)
    assert content == read_json(folder / "report.json")
    return without_timings(content)


def test_a_study_that_is_preempted_fails_and_is_killed_equals_one_that_nobody_disturbs(cluster, tmp_path):
    (tmp_path / "chaos.yaml").write_text(STUDY)
    study = ("study=chaos", f"hydra.searchpath=[sweeps://{tmp_path}]", *LONG)
    quiet, results = tmp_path / "quiet", tmp_path / "results"
    train(quiet, *study)
    mixers = read_json(quiet / "runs" / "chaos" / "study.json")["mixers"]
    runs = results / "runs" / "chaos"
    failing, preempted, killed = (
        runs / mixers[mixer]["trials"][trial]["run"]
        for mixer, trial in (("gated_deltanet", 0), ("mesa", 1), ("swa", 0))
    )
    (failing / "metrics.jsonl").mkdir(parents=True)  # where the run wants to write a file

    said = cluster.train(results, *study)
    assert "tune: 6 runs, 0 done, 6 to launch" in said and "6 queued" in said and "goes on when they have ended" in said

    cluster.wait(lambda: read_json(failing / "status.json").get("state") == "failed")
    told = cluster.module("sweeps.status", "study=chaos", f"paths.results={results}", code=1)
    assert re.search(rf"failed +{failing.name} .*IsADirectoryError", told), told
    shutil.rmtree(failing / "metrics.jsonl")
    cluster.wait(lambda: trains(preempted))
    cluster.call("srun", "--partition=urgent", "--ntasks=4", "true")
    cluster.wait(lambda: trains(killed))
    os.kill(read_json(killed / "status.json")["pid"], signal.SIGKILL)
    cluster.wait(lambda: not cluster.queue(), every=1)

    # No one logged in again: the second phase and the second tries began by themselves.
    told = cluster.module("sweeps.status", "study=chaos", f"paths.results={results}")
    assert told.endswith("study chaos: 12 done\n"), told
    again = cluster.train(results, *study)
    assert again.count("6 done, 0 to launch") == 2 and again.endswith("study chaos: 12 done\n")
    said = (preempted / "train.log").read_text()
    assert "stopped by SIGTERM at a whole step" in said and "on from step" in said
    assert read_json(killed / "status.json")["attempts"] == 2
    for folder in folders(quiet):
        assert outcome(runs / folder.name) == outcome(folder), folder.name
    assert report(results) == report(quiet)


def test_two_processes_are_two_tasks_and_both_survive_the_signal_before_the_time_limit(cluster, tmp_path):
    ddp = ("-m", "mixer=gated_deltanet", "trainer=ddp", *LONG, "steps=100", "trainer.checkpoint_every=40")
    train(tmp_path / "quiet", *[word for word in ddp if word != "-m"])
    (reference,) = folders(tmp_path / "quiet")
    folder = tmp_path / "runs" / "default" / reference.name
    cluster.train(tmp_path, *ddp)
    cluster.wait(lambda: trains(folder))
    cluster.call(
        "scancel", "--signal=USR2", read_json(folder / "job.json")["job"]
    )  # to the tasks alone, as SLURM's --signal does
    cluster.wait(lambda: not cluster.queue(), every=0.5)
    assert "stopped by SIGUSR2 at a whole step" in (folder / "train.log").read_text()
    assert outcome(folder) == outcome(reference)
    assert read_json(folder / "run.json")["hardware"]["devices"] == 2
    assert "finished: not submitted" in cluster.train(tmp_path, *ddp)


def test_queued_jobs_have_the_code_and_configs_of_their_submission_also_from_inside_a_job(cluster, tmp_path):
    """Submitted from within a job whose limits would contradict the new one's, held, everything edited, released."""
    study = tmp_path / "one.yaml"
    study.write_text("shared: {model: tiny}\nmixers: {swa: {mixer.window: [8]}}\nseeds: [0]\n")
    overrides = ("study=one", f"hydra.searchpath=[sweeps://{tmp_path}]", "logger=none", "hydra.launcher.follow=false")
    held = ("+hydra.launcher.options.hold=null", "hydra.launcher.mem=2G", "hydra/launcher=slurm_local")
    inside = ["srun", "--mem-per-cpu=500", "--ntasks=1", *command(tmp_path, *overrides, *held)]
    assert "the same command goes on when they have ended" in cluster.call(*inside)
    assert "1 queued, 0 to launch" in cluster.train(tmp_path, *overrides), "what is queued is not submitted again"
    study.write_text(study.read_text().replace("[8]", "[16]"))
    (code,) = (tmp_path / "launches" / "code").iterdir()
    module = code / "runs" / "run.py"
    module.write_text(module.read_text() + "\nlog.warning('this is the copy')\n")
    (job,) = cluster.queue().split()[:1]
    cluster.call("scontrol", "release", job)
    cluster.wait(lambda: not cluster.queue(), every=0.5)
    (folder,) = folders(tmp_path)
    assert read_json(folder / "status.json")["state"] == "done", logs(tmp_path)
    assert OmegaConf.load(folder / "config.yaml").mixer.window == 8
    assert "this is the copy" in logs(tmp_path)


def test_what_slurm_refuses_is_said_and_a_job_that_never_got_to_its_run_says_why(cluster, tmp_path):
    run = ("-m", "mixer=swa,mesa", "logger=none")
    said = cluster.train(tmp_path, *run, "hydra.launcher.partition=nosuch", code=1)
    assert "sbatch refused" in said and "invalid partition" in said and "Traceback" not in said
    (tmp_path / "one.yaml").write_text("shared: {model: tiny}\nmixers: {swa: {}}\nseeds: [0]\n")
    study = ("study=one", f"hydra.searchpath=[sweeps://{tmp_path}]", "logger=none", "hydra.launcher.follow=false")
    cluster.train(tmp_path, *study, 'hydra.launcher.setup=["echo no such module >&2","exit 3"]')
    cluster.wait(lambda: not cluster.queue(), every=0.5)
    told = cluster.module("sweeps.status", "study=one", f"paths.results={tmp_path}", code=1)
    assert re.search(r"missing +swa-\w+ .*: no such module", told), told
    assert sys.executable in next(tmp_path.glob("launches/*/array-0.sh")).read_text()
