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
    "steps=400",
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
    """The folder of one run that nobody disturbs."""
    results = tmp_path_factory.mktemp("undisturbed")
    train(results, "mixer=gated_deltanet", *HARD, "logger=wandb")
    (folder,) = folders(results)
    assert (folder / "checkpoints" / "before.ckpt").exists()
    assert read_json(folder / "status.json")["state"] == "done"
    return folder


def test_killed_at_ten_random_moments_it_ends_with_the_same_weights_and_metrics(undisturbed, tmp_path):
    reference, moments = undisturbed, random.Random(0)
    folder = tmp_path / "runs" / "default" / reference.name
    reached = []
    for attempt in range(10):
        process = start(tmp_path, "mixer=gated_deltanet", *HARD, "logger=wandb")
        # Every fifth from the start-up on; the others once training goes on, however slow the machine is.
        if attempt % 5:
            _wait_for_training(process, folder, rows=moments.randint(1, 12))
        time.sleep(moments.uniform(0, 0.05 if attempt % 5 else 4))
        assert process.poll() is None, "the run was over before it could be killed: make it longer"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reached.append(read_json(folder / "status.json").get("step", 0))
    assert len(set(reached)) > 3, f"the kills should fall all over the run: {reached}"
    train(tmp_path, "mixer=gated_deltanet", *HARD, "logger=wandb")
    assert outcome(folder) == outcome(reference)
    steps = [(row["step"], "val/loss" in row) for row in read_rows(folder / "metrics.jsonl")]
    assert len(steps) == len(set(steps))
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    history = read_offline(log)["history"]
    assert [row["_step"] for row in history] == sorted({row["_step"] for row in history})
    assert {row["_step"] for row in history} == {row["step"] for row in read_rows(folder / "metrics.jsonl")}


def _wait_for_training(process, folder, rows=1):
    """Until this process has begun and written so many rows of its own."""
    begun = None
    for _ in range(20000):
        if process.poll() is not None:
            return
        written = len(read_rows(folder / "metrics.jsonl"))
        if begun is None and read_json(folder / "status.json").get("pid") == process.pid:
            begun = written
        if begun is not None and written >= begun + rows:
            return
        time.sleep(0.005)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_signal_saves_at_a_whole_step_and_the_same_command_goes_on(undisturbed, tmp_path, sign):
    reference = undisturbed
    process = start(tmp_path, "mixer=gated_deltanet", *HARD, "logger=none")
    folder = tmp_path / "runs" / "default" / reference.name
    for _ in range(3000):
        if len(read_rows(folder / "metrics.jsonl")) > 4 or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(sign)
    assert process.wait(60) == 75, process.stderr.read()
    status = read_json(folder / "status.json")
    assert status["state"] == "preempted" and 0 < status["step"] < 400
    train(tmp_path, "mixer=gated_deltanet", *HARD, "logger=none")
    assert outcome(folder) == outcome(reference)


def test_two_passes_resume_with_all_their_training_aids(tmp_path):
    """Randomness of the aids and lambda's schedule are functions of the step."""
    aids = ("mixer.own_memory_prob=0.5", "mixer.extra_passes=1", "mixer.lam_steps=100", "mixer.memory_residual=0.3")
    size = ("mixer=maglev", "mixer.sharing=separate", "mixer.window=8", *aids, *HARD, "steps=60", "logger=none")
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole", *size)
    (reference,) = folders(tmp_path / "whole")
    process = start(tmp_path / "stopped", *size)
    folder = tmp_path / "stopped" / "runs" / "default" / reference.name
    _wait_for_training(process, folder)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, process.stderr.read()
    assert 0 < read_json(folder / "status.json")["step"] < 60
    train(tmp_path / "stopped", *size)
    assert outcome(folder) == outcome(reference)
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "train/loss" in row]
    assert all({"train/objective", "train/distance"} <= row.keys() for row in rows)
    assert read_json(folder / "run.json")["mode"] == "recurrent"


def test_torn_checkpoint_falls_back_to_the_one_before(undisturbed, tmp_path):
    reference = undisturbed
    folder = tmp_path / "runs" / "default" / reference.name
    shutil.copytree(reference, folder)
    last = folder / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    status = read_json(folder / "status.json")
    (folder / "status.json").write_text(json.dumps({**status, "state": "running"}))
    done = train(tmp_path, "mixer=gated_deltanet", *HARD, "logger=none")
    assert "is torn" in done.stdout and "on from step 399 of 400" in done.stdout
    assert outcome(folder) == outcome(reference)


def test_killed_between_the_last_checkpoint_and_the_end(undisturbed, tmp_path):
    folder = tmp_path / "runs" / "default" / undisturbed.name
    shutil.copytree(undisturbed, folder)
    record = read_json(folder / "run.json")
    for late in ("metrics", "weights", "timing", "finished"):
        del record[late]
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "test_documents.npz").unlink()
    status = read_json(folder / "status.json")
    (folder / "status.json").write_text(json.dumps({**status, "state": "running"}))
    done = train(tmp_path, "mixer=gated_deltanet", *HARD, "logger=wandb")
    assert "on from step 400 of 400" in done.stdout
    assert outcome(folder) == outcome(undisturbed) and (folder / "test_documents.npz").exists()
    timing, before = (read_json(path / "run.json")["timing"] for path in (folder, undisturbed))
    for of_training in ("seconds", "tokens_per_s"):
        assert timing[of_training] == before[of_training]


def test_code_of_an_attempt_that_left_nothing_does_not_count_and_changed_data_is_refused(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("".join(f"line {i} of a small text\n" for i in range(3000)))
    settings = (
        "mixer=swa",
        "logger=none",
        "data=files",
        f"data.paths=[{text}]",
        "data.cut_chars=200",
        f"paths.cache={tmp_path}/cache",
    )
    train(tmp_path, *settings)
    (folder,) = folders(tmp_path)
    whole = outcome(folder)
    record, status = read_json(folder / "run.json"), read_json(folder / "status.json")
    (folder / "run.json").write_text(json.dumps({**record, "code": {"shared": "0", "mixer": "0"}}))
    (folder / "status.json").write_text(json.dumps({**status, "state": "failed"}))
    checkpoints = folder / "checkpoints"
    checkpoints.rename(tmp_path / "kept")
    assert "other code" not in train(tmp_path, *settings).stdout
    assert (
        read_json(folder / "run.json")["code"] == record["code"] and not read_json(folder / "run.json")["code_changed"]
    )
    assert outcome(folder) == whole
    text.write_text(text.read_text() + "one more line\n")
    (folder / "status.json").write_text(json.dumps({**status, "state": "failed"}))
    done = train(tmp_path, *settings, code=1)
    assert "data: this run was begun with data" in done.stderr
    assert outcome(folder) == whole, "nothing written so far is lost"


def test_finished_run_is_skipped_and_changed_code_warns(undisturbed):
    folder = undisturbed
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


@pytest.mark.parametrize("mixer", ["swa", "maglev"])
def test_two_processes_have_the_losses_of_one(tmp_path, mixer):
    plain = (f"mixer={mixer}", "logger=none", "model.dropout=0")
    train(tmp_path / "one", *plain)
    train(tmp_path / "two", *plain, "trainer=ddp", "trainer.threads=1")
    train(tmp_path / "cut", *plain, "trainer.micro_batch=1")
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
        "steps=150",  # far from done when the signal comes, however busy the machine is
    )
    train(tmp_path / "whole", *settings)
    process = start(tmp_path / "cut", *settings)
    folder = tmp_path / "cut" / "runs" / "default" / folders(tmp_path / "whole")[0].name
    for _ in range(20000):
        if len(read_rows(folder / "metrics.jsonl")) > 10 or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.wait(180)
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


def test_missing_devices_are_named_before_anything_is_written(tmp_path):
    done = train(tmp_path, "mixer=swa", "trainer=gpu", "trainer.threads=1", "logger=none", code=1)
    assert "trainer.accelerator=gpu: trainer.devices=1, but torch" in done.stderr and not list(tmp_path.iterdir())


def test_wandb_online_without_account_or_network_does_not_hang_or_fail(tmp_path):
    offline = environment() | {"WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    offline.pop("WANDB_API_KEY", None)
    offline.pop("WANDB_MODE", None)
    begin = time.time()
    done = subprocess.run(
        command(tmp_path, "mixer=swa", "steps=4", "logger=wandb_online"),
        cwd=ROOT,
        env=offline,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "W&B: " in done.stdout and "the run goes on" in done.stdout
    assert time.time() - begin < 100


def test_compiled_blocks_train_alike(tmp_path):
    """torch.compile reorders additions and nothing else; the names of the weights stay as they are."""
    settings = ("mixer=swa", "logger=none", "steps=4", "schedule.warmup_steps=1")
    train(tmp_path / "plain", *settings)
    train(tmp_path / "compiled", *settings, "trainer.compile=true")
    (plain, compiled) = (folders(tmp_path / name)[0] for name in ("plain", "compiled"))
    assert outcome(compiled)[1] == pytest.approx(outcome(plain)[1], rel=1e-4)
    assert plain.name == compiled.name


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
