"""Where a run is computed: devices, threads, versions, commit. Recorded, printed, never hashed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig

from runs.schema import Config
from runs.validate import ConfigError

MARK = ".snapshot.json"
"""Lies in a copy of the code that `sweeps.snapshot` made for queued jobs, and says which commit it was."""

PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "numpy", "tokenizers", "wandb")


def set_threads(config: Config) -> int:
    """Use the cores that this process may use, shared between the local processes. More threads than cores, as when
    several jobs each take all of them, can slow a step fifty times."""
    cores = len(os.sched_getaffinity(0))
    processes = config.trainer.devices * _side_by_side()
    share = int(os.environ.get("SLURM_CPUS_PER_TASK", max(1, cores // processes)))
    threads = config.trainer.threads or share
    torch.set_num_threads(threads)
    return threads


def _side_by_side() -> int:
    """How many runs hydra/launcher=joblib computes at a time; 1 without it."""
    if not HydraConfig.initialized() or HydraConfig.get().runtime.choices.get("hydra/launcher") != "joblib":
        return 1
    import joblib

    return joblib.effective_n_jobs(HydraConfig.get().launcher.n_jobs)


def check_devices(config: Config) -> None:
    """Raise ConfigError where this machine lacks the devices. Not a part of validation: that also runs where jobs are
    submitted from."""
    if config.trainer.accelerator == "gpu":
        found = torch.cuda.device_count()
        if found < config.trainer.devices:
            raise ConfigError(
                f"trainer.accelerator=gpu: trainer.devices={config.trainer.devices}, but torch {torch.__version__} sees "
                f"{found} CUDA devices here. Use trainer=cpu, fewer devices, or a CUDA build of torch"
            )


def is_first_process() -> bool:
    """Is this the process that owns the run folder? A local child of data parallelism has LOCAL_RANK alone, a SLURM
    task SLURM_PROCID; the first variable that is set tells."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name]) == 0
    return True


def git_commit(root: Path) -> str | None:
    """The commit of the code, with ``+changes`` if tracked files differ from it; None outside a checkout."""
    if (root / MARK).exists():  # git would answer for the checkout around it, as it is now
        return json.loads((root / MARK).read_text())["commit"]

    def git(*arguments: str) -> str | None:
        run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return run.stdout.strip() if run.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
        return commit and commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except FileNotFoundError:
        return None


def processor() -> str:
    """The CPU's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe(config: Config, threads: int) -> dict[str, Any]:
    """Hardware, versions and host settings for run.json."""
    gpu = config.trainer.accelerator == "gpu"
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "hardware": {
            "cpu": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "threads": threads,
            "gpu": torch.cuda.get_device_name(0) if gpu and torch.cuda.is_available() else None,
            "devices": config.trainer.devices * config.trainer.nodes,
        },
        "versions": {"python": platform.python_version(), **versions},
        "hostname": platform.node(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
