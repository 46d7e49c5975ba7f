"""The folder stays whole and belongs to one process."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from runs import checkpoints, folder
from runs.folder import Busy, RunFolder, write_atomic


def test_lock_keeps_a_second_process_out_and_a_kill_frees_it(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from runs.folder import RunFolder\n"
        "f = RunFolder(Path(sys.argv[1])); f.lock(); f.set_status(state='running'); print('locked', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(Busy, match=f"process {other.pid} on "):
            RunFolder(tmp_path).lock()
    finally:
        other.kill()
        other.wait()
    mine = RunFolder(tmp_path)
    mine.lock()
    mine.release()


def test_without_flock_the_heartbeat_decides(tmp_path, monkeypatch):
    def no_flock(*_):
        raise OSError(folder.errno.ENOLCK, "no locks here")

    monkeypatch.setattr(folder.fcntl, "flock", no_flock)
    status = {"state": "running", "heartbeat": time.time(), "pid": 1, "host": "elsewhere"}
    write_atomic(tmp_path / "status.json", json.dumps(status))
    with pytest.raises(Busy, match="process 1 on elsewhere"):
        RunFolder(tmp_path).lock()
    write_atomic(tmp_path / "status.json", json.dumps({**status, "heartbeat": time.time() - 3600}))
    mine = RunFolder(tmp_path)
    mine.lock()
    mine.release()


def test_heartbeat_renews_and_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "HEARTBEAT_SECONDS", 0.05)
    mine = RunFolder(tmp_path)
    mine.lock()
    mine.set_status(state="running")
    first = mine.status()["heartbeat"]
    time.sleep(0.4)
    assert mine.status()["heartbeat"] > first and mine.status()["state"] == "running"
    mine.release()
    last = mine.status()["heartbeat"]
    time.sleep(0.2)
    assert mine.status()["heartbeat"] == last


def test_metrics_are_cut_back_to_the_checkpoint_and_a_torn_line_is_dropped(tmp_path):
    mine = RunFolder(tmp_path)
    for step in (1, 2, 3):
        mine.log({"step": step, "tokens": 10 * step})
    mine.release()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "tok')
    assert [row["step"] for row in mine.rows()] == [1, 2, 3]
    mine.cut_metrics(2)
    mine.log({"step": 3, "tokens": 30})
    assert [row["step"] for row in mine.rows()] == [1, 2, 3]


def test_write_atomic_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def save(path, step, run_id="abc"):
    checkpoints.AtomicCheckpointIO().save_checkpoint(
        {"global_step": step, "run_id": run_id, "x": torch.arange(10_000)}, path / "checkpoints" / checkpoints.LAST
    )


def test_newest_whole_checkpoint_is_found(tmp_path):
    assert checkpoints.find(tmp_path, "abc") == (None, 0)
    save(tmp_path, 10)
    save(tmp_path, 20)
    path, step = checkpoints.find(tmp_path, "abc")
    assert (path.name, step) == ("last.ckpt", 20)
    whole = path.read_bytes()
    for torn in (b"", whole[: len(whole) // 2], whole[:-30]):
        path.write_bytes(torn)
        found, step = checkpoints.find(tmp_path, "abc")
        assert (found.name, step) == ("before.ckpt", 10)
    assert not path.exists()  # as after a kill between the two renames
    assert checkpoints.find(tmp_path, "abc")[1] == 10
    save(tmp_path, 30)
    assert checkpoints.find(tmp_path, "abc")[1] == 30
    assert checkpoints.load(tmp_path / "checkpoints" / "before.ckpt")["global_step"] == 10, "never a torn one"


def test_checkpoint_of_another_run_is_refused(tmp_path):
    save(tmp_path, 10, run_id="other")
    with pytest.raises(RuntimeError, match="belongs to run other, not to abc"):
        checkpoints.find(tmp_path, "abc")
