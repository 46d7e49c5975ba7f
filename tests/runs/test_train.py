"""Whole runs: killed and resumed, in parallel, in a multirun, failing, finished."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest

from runs.folder import read_json, read_rows
from tests.runs.commands import ROOT, command, environment, folders, outcome, train
from tests.runs.offline_wandb import read_offline

pytestmark = pytest.mark.slow

# Accumulation, dropout, and logs, validations and checkpoints that do not fall together: what a resume could get wrong.
HARD = (
    "steps=60",
    "trainer.micro_batch=2",
    "trainer.checkpoint_every=7",
    "trainer.log_every=3",
    "evaluation.every=10",
    "model.dropout=0.1",
)


def start(results, *overrides):
    return subprocess.Popen(
        command(results, *overrides),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """One run that nobody disturbs, with the time at which its training began and ended."""
    results = tmp_path_factory.mktemp("undisturbed")
    begin = time.time()
    train(results, "mixer=gated_deltanet", *HARD, "logger=wandb")
    (folder,) = folders(results)
    first = (folder / "checkpoints" / "before.ckpt").exists()
    assert first and read_json(folder / "status.json")["state"] == "done"
    return folder, time.time() - begin


def test_killed_at_ten_random_moments_it_ends_with_the_same_weights_and_metrics(undisturbed, tmp_path):
    reference, seconds = undisturbed
    moments, kills, late = random.Random(0), 0, 0
    folder = tmp_path / "runs" / "default" / reference.name
    for attempt in range(60):
        process = start(tmp_path, "mixer=gated_deltanet", *HARD, "logger=wandb")
        status = folder / "status.json"
        # From the start-up on; most kills land in training, since a run that has begun is waited for.
        if attempt % 3:
            _wait_for_training(process, status)
            time.sleep(moments.uniform(0, 0.12 * seconds))
        else:
            time.sleep(moments.uniform(0.2, 0.8 * seconds))
        if process.poll() is not None:
            late += 1
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        if kills >= 10:
            break
    train(tmp_path, "mixer=gated_deltanet", *HARD, "logger=wandb")
    assert kills >= 3, "the run was over before it could be killed often enough: make it longer"
    assert outcome(folder) == outcome(reference)
    steps = [(row["step"], "val/loss" in row) for row in read_rows(folder / "metrics.jsonl")]
    assert len(steps) == len(set(steps))
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    history = read_offline(log)["history"]
    assert [row["_step"] for row in history] == sorted({row["_step"] for row in history})
    assert {row["_step"] for row in history} == {row["step"] for row in read_rows(folder / "metrics.jsonl")}


def _wait_for_training(process, status):
    for _ in range(2000):
        if process.poll() is not None:
            return
        if status.exists() and read_json(status).get("pid") == process.pid:
            return
        time.sleep(0.02)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_signal_saves_at_a_whole_step_and_the_same_command_goes_on(undisturbed, tmp_path, sign):
    reference, _ = undisturbed
    process = start(tmp_path, "mixer=gated_deltanet", *HARD, "logger=none")
    folder = tmp_path / "runs" / "default" / reference.name
    for _ in range(3000):
        if len(read_rows(folder / "metrics.jsonl")) > 4 or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(sign)
    assert process.wait(60) == 75, process.stderr.read()
    status = read_json(folder / "status.json")
    assert status["state"] == "preempted" and 0 < status["step"] < 60
    train(tmp_path, "mixer=gated_deltanet", *HARD, "logger=none")
    assert outcome(folder) == outcome(reference)


def test_torn_checkpoint_falls_back_to_the_one_before(undisturbed, tmp_path):
    reference, _ = undisturbed
    folder = tmp_path / "runs" / "default" / reference.name
    shutil.copytree(reference, folder)
    last = folder / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    status = read_json(folder / "status.json")
    (folder / "status.json").write_text(json.dumps({**status, "state": "running"}))
    done = train(tmp_path, "mixer=gated_deltanet", *HARD, "logger=none")
    assert "is torn" in done.stdout and "on from step 56 of 60" in done.stdout
    assert outcome(folder) == outcome(reference)


def test_finished_run_is_skipped_and_changed_code_warns(undisturbed):
    folder, _ = undisturbed
    before = (folder / "run.json").read_text()
    done = train(folder.parents[2], "mixer=gated_deltanet", *HARD, "logger=wandb")
    assert f"{folder.name} is finished: skipped" in done.stdout and "other code" not in done.stdout
    assert (folder / "run.json").read_text() == before
    record = json.loads(before)
    record["code"]["shared"] = "0123456789ab"
    (folder / "run.json").write_text(json.dumps(record))
    done = train(folder.parents[2], "mixer=gated_deltanet", *HARD, "logger=wandb")
    assert "begun with other code (shared changed since)" in done.stdout
    (folder / "run.json").write_text(before)


def test_two_processes_have_the_losses_of_one(tmp_path):
    train(tmp_path / "one", "mixer=swa", "logger=none", "model.dropout=0")
    train(tmp_path / "two", "mixer=swa", "logger=none", "model.dropout=0", "trainer=ddp", "trainer.threads=1")
    train(tmp_path / "cut", "mixer=swa", "logger=none", "model.dropout=0", "trainer.micro_batch=1")
    one, two, cut = (outcome(folders(tmp_path / name)[0]) for name in ("one", "two", "cut"))
    for other in (two, cut):
        assert [row["step"] for row in one[2]] == [row["step"] for row in other[2]]
        for mine, theirs in zip(one[2], other[2], strict=True):
            assert theirs == pytest.approx(mine, rel=2e-4), "equal but for the order of float additions"
        assert other[1]["test/bits_per_byte"] == pytest.approx(one[1]["test/bits_per_byte"], rel=2e-4)
    assert folders(tmp_path / "one")[0].name == folders(tmp_path / "two")[0].name


def test_data_parallel_run_resumes(tmp_path):
    settings = (
        "mixer=swa",
        "logger=none",
        "trainer=ddp",
        "trainer.threads=1",
        "trainer.checkpoint_every=3",
        "steps=40",
    )
    train(tmp_path / "whole", *settings)
    process = start(tmp_path / "cut", *settings)
    folder = tmp_path / "cut" / "runs" / "default" / folders(tmp_path / "whole")[0].name
    for _ in range(6000):
        if len(read_rows(folder / "metrics.jsonl")) > 10 or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert read_json(folder / "status.json")["state"] == "preempted"
    train(tmp_path / "cut", *settings)
    assert outcome(folder) == outcome(folders(tmp_path / "whole")[0])


def test_data_parallel_multirun_in_one_process_is_refused(tmp_path):
    done = train(tmp_path, "-m", "mixer=swa,transformer", "logger=none", "trainer=ddp", code=1)
    assert "trainer.strategy=ddp: the processes of a multirun" in done.stderr


def test_multirun_gives_four_wandb_runs_with_their_own_configs(tmp_path):
    train(tmp_path, "-m", "mixer=swa,transformer", "seed=0,1", "steps=4")
    seen = {}
    for folder in folders(tmp_path):
        (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
        run = read_offline(log)
        seen[(run["config"]["mixer_name"], run["config"]["seed"])] = run
        assert run["run"]["name"] == folder.name and run["run"]["group"] == "default" and run["exit"] == 0
        assert run["run"]["job_type"] == "train" and run["config"]["mixer_name"] in run["run"]["tags"]
        assert run["config"]["mixer.kind"] == run["config"]["mixer_name"]
        assert {row["_step"] for row in run["history"]} == {1, 2, 3, 4}
        assert run["history"][-1]["tokens"] == 4 * 4 * 32
        assert run["summary"]["test/bits_per_byte"] == read_json(folder / "run.json")["metrics"]["test/bits_per_byte"]
    assert set(seen) == {(m, s) for m in ("swa", "transformer") for s in (0, 1)}


def test_number_that_is_not_finite_names_the_layer_and_leaves_the_checkpoint(tmp_path):
    settings = ("mixer=swa", "trainer.checkpoint_every=2", "trainer.log_every=1", "schedule.warmup_steps=0")
    done = train(tmp_path, *settings, "optimizer.lr=1e30", "optimizer.clip=null", "logger=wandb", code=1)
    (folder,) = folders(tmp_path)
    status = read_json(folder / "status.json")
    assert status["state"] == "failed"
    assert re.search(r"NotFinite: step 2: .* not.* backbone\.blocks\.0", status["error"]), status["error"]
    assert status["step"] == 0 and not (folder / "checkpoints").exists(), "nothing was saved after the weights blew up"
    assert "Traceback" not in done.stderr and status["error"] in done.stderr
    assert "Traceback" in (folder / "train.log").read_text()
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert read_offline(log)["exit"] == 1


def test_wandb_that_cannot_start_does_not_fail_a_run(tmp_path):
    broken = environment() | {"PYTHONPATH": str(tmp_path / "broken")}
    (tmp_path / "broken" / "wandb").mkdir(parents=True)
    (tmp_path / "broken" / "wandb" / "__init__.py").write_text("raise OSError('no wandb today')")
    done = subprocess.run(
        command(tmp_path, "mixer=swa", "steps=4"), cwd=ROOT, env=broken, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "W&B: OSError: no wandb today" in done.stdout


def test_another_process_in_the_folder_is_left_alone(tmp_path):
    first = start(tmp_path, "mixer=swa", "logger=none", "steps=2000")
    for _ in range(3000):
        found = folders(tmp_path)
        if found and read_json(found[0] / "status.json").get("state") == "running":
            break
        time.sleep(0.01)
    done = train(tmp_path, "mixer=swa", "logger=none", "steps=2000")
    first.kill()
    first.wait()
    assert f"process {first.pid} on " in done.stdout and "skipped" in done.stdout


def test_the_options_of_training_change_no_results(tmp_path):
    """Checkpointing and chunked loss cost or save memory and time; compile may reorder additions."""
    reference = None
    for i, options in enumerate(([], ["trainer.activation_checkpointing=true"], ["trainer.loss_chunk=50"])):
        train(tmp_path / str(i), "mixer=gated_deltanet", "logger=none", "model.dropout=0.2", "steps=6", *options)
        _, metrics, rows = outcome(folders(tmp_path / str(i))[0])
        reference = reference or (metrics, rows)
        assert metrics == pytest.approx(reference[0], rel=1e-5)
    train(tmp_path / "bf16", "mixer=gated_deltanet", "logger=none", "model.dropout=0.2", "steps=6", "precision=bf16")
    _, metrics, _ = outcome(folders(tmp_path / "bf16")[0])
    assert metrics != reference[0] and metrics == pytest.approx(reference[0], rel=0.02)
