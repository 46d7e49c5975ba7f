"""Settings, scripts, environment and code copies for SLURM, without one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from runs.host import git_commit
from runs.identity import ROOT
from runs.run import STOPPED
from runs.validate import ConfigError
from sweeps import job, slurm
from sweeps.job import load
from sweeps.slurm import Slurm, SlurmError, array_script, clean_environment, follow_script
from sweeps.snapshot import LARGEST, snapshot
from sweeps.submit import Prepared
from tests.runs.commands import environment

ARRAY = {"nodes": 1, "devices": 2, "gpus": 0, "folder": Path("/launch"), "code": Path("/code"), "python": "python"}


def settings(**changes) -> Slurm:
    return Slurm.parse({"name": "isomix", **changes})


def options(script: str) -> dict[str, str]:
    """What a script's #SBATCH lines say."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert len(lines) == len({line.partition("=")[0] for line in lines}), "an option is there twice"
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


# ---- settings --------------------------------------------------------------------------------------------------------


def test_the_yaml_lists_every_key_with_its_default():
    file = yaml.safe_load((ROOT / "conf" / "hydra" / "launcher" / "slurm.yaml").read_text())
    assert list(file)[1:] == list(Slurm.__dataclass_fields__)
    plain = vars(settings())
    site_free = {key: value for key, value in file.items() if key not in ("_target_", "follow_options")}
    assert site_free == {key: plain[key] for key in site_free}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partitoin": "gpu"}, ["hydra.launcher.partitoin: unknown key", "'partition'"]),
        ({"cpus_per_task": 0}, ["hydra.launcher.cpus_per_task=0"]),
        ({"cpus_per_task": "many"}, ["hydra.launcher.cpus_per_task=many"]),
        ({"retries": -1}, ["hydra.launcher.retries=-1"]),
        ({"time": 0}, ["hydra.launcher.time=0", "1-12:00:00"]),
        ({"options": {"array": "0-3"}}, ["hydra.launcher.options.array", "remove it"]),
        ({"options": {"partition": "gpu"}}, ["hydra.launcher.options.partition", "hydra.launcher.partition"]),
        ({"follow_options": {"dependency": "x"}}, ["hydra.launcher.follow_options.dependency"]),
    ],
)
def test_errors_name_the_key_its_value_and_what_would_be_right(changes, words):
    with pytest.raises(ConfigError) as caught:
        settings(**changes)
    for word in words:
        assert word in str(caught.value)


# ---- scripts ---------------------------------------------------------------------------------------------------------


def test_the_script_of_an_array():
    asked = settings(partition="gpu", time="1-0", mem="8G", setup=["module load x"], options={"hold": None, "nice": 5})
    script = array_script(asked, **{**ARRAY, "gpus": 2}, first=7, jobs=3)
    found = options(script)
    assert found["array"] == "0-2%64" and found["ntasks-per-node"] == "2" == found["gpus-per-node"]
    assert (found["partition"], found["time"], found["mem"]) == ("gpu", "1-0", "8G")
    assert found["hold"] == "" and found["nice"] == "5" and found["signal"] == "USR2@90" and "requeue" in found
    assert "account" not in found and "qos" not in found
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash" and lines.index("module load x") < lines.index(
        "export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}"
    )
    assert "$((7 + SLURM_ARRAY_TASK_ID))" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_gpus_follow_the_devices_unless_they_are_given():
    assert "gpus-per-node" not in options(array_script(settings(), **ARRAY, first=0, jobs=1))
    given = array_script(settings(gpus_per_node=4), **{**ARRAY, "gpus": 1}, first=0, jobs=1)
    assert options(given)["gpus-per-node"] == "4"
    none = array_script(settings(gpus_per_node=0), **{**ARRAY, "gpus": 1}, first=0, jobs=1)
    assert "gpus-per-node" not in options(none)


@pytest.mark.parametrize(("code", "state", "requeued"), [(75, "RUNNING", True), (75, "COMPLETING", False), (1, "RUNNING", False), (0, "RUNNING", False)])  # fmt: skip
def test_only_a_stopped_run_of_a_job_that_slurm_still_calls_running_is_requeued(tmp_path, code, state, requeued):
    """Preemption requeues by itself, scancel must not, and a failure would fail again."""
    for name, text in {"srun": f"exit {code}", "squeue": f"echo {state}", "scontrol": f'echo "$@" > {tmp_path}/asked'}.items():  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = array_script(settings(), **ARRAY, first=0, jobs=1)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"}
    assert subprocess.run(["bash"], input=script, env=env, text=True, check=False).returncode == code
    asked = tmp_path / "asked"
    assert asked.exists() == requeued and (not requeued or asked.read_text() == "requeue 12\n")


def test_the_job_that_follows_waits_for_whole_arrays_and_for_its_like():
    asked = settings(partition="gpu", account="us", follow_options={"partition": "cpu", "time": 5})
    command = ["python", "train.py", "study=it's"]
    script = follow_script(
        asked, name="next", jobs=["12_0", "12_1", "9_3"], log=Path("/log"), code=Path("/code"), command=command
    )
    found = options(script)
    assert found["dependency"] == "afterany:9:12,singleton" and found["job-name"] == "next"
    assert (found["partition"], found["account"], found["time"]) == ("cpu", "us", "5")
    echoed = subprocess.run(
        ["bash"], input=script.replace("python train.py", "echo"), capture_output=True, text=True, check=True
    )
    assert echoed.stdout == "study=it's\n"


def test_a_surrounding_job_leaves_nothing_behind_but_the_cluster(monkeypatch):
    for key in ("SLURM_MEM_PER_CPU", "SLURM_CONF", "SBATCH_ACCOUNT", "LOCAL_RANK", "MINE"):
        monkeypatch.setenv(key, "x")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    kept = {"SLURM_MEM_PER_CPU", "SLURM_CONF", "SBATCH_ACCOUNT", "MINE"}
    assert kept <= set(clean_environment()) and "LOCAL_RANK" not in clean_environment()
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    inside = clean_environment()
    assert {"SLURM_CONF", "MINE"} <= set(inside)
    assert not {"SLURM_MEM_PER_CPU", "SBATCH_ACCOUNT", "SLURM_JOB_ID", "LOCAL_RANK"} & set(inside)


def test_squeue_is_read_and_its_silence_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = tmp_path / "squeue"
    program.write_text("#!/bin/bash\necho '12_3|PENDING|(Resources)|a|b'\necho '12_4|RUNNING|node7|c'\n")
    program.chmod(0o755)
    found = slurm.queue()
    assert found["12_3"] == slurm.Queued("PENDING", "Resources", "a|b")
    assert found["12_4"].state == "RUNNING" and found["12_4"].reason == "node7"
    program.write_text("#!/bin/bash\necho 'cannot contact controller' >&2\nexit 1\n")
    with pytest.raises(SlurmError, match="cannot contact controller"):
        slurm.queue()


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_reads_back_what_was_composed(tmp_path):
    overrides = ["mixer=mesa", "optimizer.lr=1e-3", "hydra/launcher=slurm", "trainer=ddp"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides, return_hydra_config=True)
    OmegaConf.save(config, tmp_path / "0.yaml")
    back = load(tmp_path / "0.yaml")
    assert OmegaConf.to_container(back) == OmegaConf.to_container(config)
    assert OmegaConf.get_type(back, "hydra") is OmegaConf.get_type(config, "hydra")
    one, other = Prepared.of(config), Prepared.of(back)
    assert one.folder.path == other.folder.path and one.shape == (1, 2, 0) == other.shape


def test_runs_that_ask_for_the_same_share_an_array():
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        base = ["mixer=swa", "hydra/launcher=slurm"]
        one, two, ddp, longer = (
            Prepared.of(compose("config", [*base, *more], return_hydra_config=True))
            for more in (["seed=1"], ["seed=2"], ["trainer=ddp"], ["hydra.launcher.time=${steps}"])
        )
    assert one.group == two.group
    assert len({one.group, ddp.group, longer.group}) == 3 and longer.settings.time == 400


# ---- the copy of the code --------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A small git checkout with results in it that git does not ignore."""
    root = tmp_path / "checkout"
    for name, text in {"train.py": "1", "pkg/a.py": "2", "out/runs/x.json": "3", "ignored.txt": "4"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / ".gitignore").write_text("ignored.txt\n")
    (root / "big.bin").write_bytes(b"\0" * (LARGEST + 1))
    for words in (
        ["init", "-q"],
        ["add", "train.py"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    return root


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_copy_of_the_code_is_what_git_would_see_and_stays_as_it_is(checkout):
    results = checkout / "out"
    copy = snapshot(checkout, results / "code", results)
    names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert names == {"train.py", "pkg/a.py", ".gitignore", ".snapshot.json"}
    assert snapshot(checkout, results / "code", results) == copy, "equal code is copied once"
    assert snapshot(copy, results / "code", results) == copy, "a job that submits goes on with its own code"
    commit = git_commit(checkout)
    assert (
        commit is not None and git_commit(copy) == commit == json.loads((copy / ".snapshot.json").read_text())["commit"]
    )
    (checkout / "train.py").write_text("edited")
    assert (copy / "train.py").read_text() == "1"
    edited = snapshot(checkout, results / "code", results)
    assert edited != copy and git_commit(edited) == f"{commit}+changes"
    assert sorted(path.name for path in (results / "code").iterdir()) == sorted([copy.name, edited.name])


def test_outside_a_checkout_it_is_said_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ConfigError, match="hydra.launcher.snapshot=true.*not a git checkout"):
        snapshot(tmp_path, tmp_path / "code", tmp_path / "results")


@pytest.mark.slow
def test_a_job_whose_run_another_process_has_comes_back_later_and_one_that_cannot_begin_says_why(tmp_path):
    overrides = ["mixer=swa", f"paths.results={tmp_path}", "hydra/launcher=slurm", "steps=3", "schedule.warmup_steps=1"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for number, more in enumerate(([], ["trainer=gpu"])):
            config = compose("config", [*overrides, *more], return_hydra_config=True)
            OmegaConf.save(config, tmp_path / f"{number}.yaml")
    folder = Prepared.of(config).folder  # the same for both: devices do not count

    def job(number: int) -> subprocess.CompletedProcess:
        words = [sys.executable, "-m", "sweeps.job", str(tmp_path), str(number)]
        return subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)

    folder.lock()
    try:
        busy = job(0)
    finally:
        folder.release()
    assert busy.returncode == STOPPED and "is running it: skipped" in busy.stdout
    assert job(1).returncode == 1
    assert folder.status()["state"] == "failed" and "trainer.accelerator=gpu" in folder.status()["error"]


@pytest.mark.slow
def test_without_slurm_it_is_said_in_one_sentence(tmp_path):
    words = [sys.executable, "train.py", "-m", "mixer=swa", f"paths.results={tmp_path}", "hydra/launcher=slurm"]
    done = subprocess.run(words, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "there is no" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("code", "deaf"), [(75, True), (1, False)])
def test_a_task_that_was_stopped_is_not_killed_on_its_way_out(
    monkeypatch: pytest.MonkeyPatch, code: int, deaf: bool
) -> None:
    """srun terminates the other tasks as soon as one has left: their code, which has the job requeued, would be lost."""

    def stopped(_: list[str]) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(job, "_run", stopped)
    before = {number: signal.getsignal(number) for number in job.SIGNALS}
    try:
        with pytest.raises(SystemExit):
            job.main([])
        assert all((signal.getsignal(number) is signal.SIG_IGN) == deaf for number in job.SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
