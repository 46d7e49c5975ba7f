"""How the cores of a machine are shared between the processes and runs on it."""

from __future__ import annotations

import os

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from runs.host import set_threads
from runs.identity import ROOT
from runs.validate import validate


@pytest.mark.parametrize(
    ("overrides", "slurm", "threads"),
    [
        ([], None, 8),
        (["trainer=ddp"], None, 4),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=4"], None, 2),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=16"], None, 1),
        (["hydra/launcher=slurm"], "3", 3),
        (["trainer.threads=5", "hydra/launcher=joblib"], "3", 5),
    ],
)
def test_threads_are_the_cores_shared_by_what_runs_side_by_side(monkeypatch, overrides, slurm, threads):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", ["mixer=swa", *overrides], return_hydra_config=True)
    science = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    HydraConfig.instance().set_config(config)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", slurm)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert set_threads(validate(science)) == threads and asked == [threads]
