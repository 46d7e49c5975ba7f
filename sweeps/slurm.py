"""Talking to SLURM: settings, batch scripts, sbatch and squeue. Needs no accounting (`sacct`) and no submitit.

Who does what when a job is stopped: SLURM signals the tasks (USR2 before the time limit, TERM when preempted or
cancelled), the run saves at the end of its optimizer step and exits with code 75 (`runs.steps`), and then the shell
around it asks SLURM to requeue the job, if SLURM still calls it running. It does not after a preemption, which requeues
by itself, nor after scancel, which must not.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from models.config import at_least
from runs.run import STOPPED
from runs.validate import ConfigError, typed

ARRAY_SIZE = 1000
"""Jobs of one array: SLURM's own limit (MaxArraySize) is 1001 where a site says nothing."""

RESERVED = ("array", "chdir", "dependency", "nodes", "ntasks-per-node", "open-mode", "output", "requeue", "signal")
OWN_KEYS = {"job-name": "name", "mem": "mem", "time": "time", "partition": "partition", "account": "account"}
OWN_KEYS |= {"qos": "qos", "cpus-per-task": "cpus_per_task", "gpus-per-node": "gpus_per_node"}

INHERITED = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_", "PMI2_")
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class SlurmError(ConfigError):
    """SLURM refused something; its own words are in the message."""


@dataclass
class Slurm:
    """``hydra.launcher`` of hydra/launcher=slurm; the YAML explains each key."""

    name: str = MISSING
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: Any = 60
    cpus_per_task: int = 1
    gpus_per_node: int | None = None
    mem: str | None = None
    array_parallelism: int = 64
    signal_seconds: int = 90
    setup: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    srun: list[str] = field(default_factory=list)
    python: str | None = None
    snapshot: bool = True
    wait: bool = False
    follow: bool = True
    follow_options: dict[str, Any] = field(default_factory=dict)
    retries: int = 1

    def check(self, path: str) -> None:
        for name in ("cpus_per_task", "array_parallelism", "signal_seconds"):
            at_least(f"{path}.{name}", getattr(self, name), 1)
        for name in ("gpus_per_node", "retries"):
            at_least(f"{path}.{name}", getattr(self, name), 0)
        if not (type(self.time) is int and self.time > 0) and not (isinstance(self.time, str) and self.time):
            raise ValueError(f"{path}.time={self.time}: must be minutes, or a text such as 1-12:00:00")
        for group in ("options", "follow_options"):
            for key in getattr(self, group):
                if key in RESERVED:
                    raise ValueError(f"{path}.{group}.{key}: is set by the launcher; remove it")
                if group == "options" and key in OWN_KEYS:
                    raise ValueError(f"{path}.options.{key}: has a key of its own, {path}.{OWN_KEYS[key]}")

    @classmethod
    def parse(cls, node: dict[str, Any]) -> Slurm:
        """From the resolved ``hydra.launcher``. Raises ConfigError."""
        values = {key: value for key, value in node.items() if key != "_target_"}
        settings = typed(cls, values, "hydra.launcher", "slurm")
        try:
            settings.check("hydra.launcher")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return settings

    def common(self) -> dict[str, Any]:
        """What all jobs share, the one that follows included."""
        return {"job-name": self.name, "partition": self.partition, "account": self.account, "qos": self.qos}


def header(options: dict[str, Any], more: dict[str, Any]) -> list[str]:
    """``#SBATCH`` lines. Of ``options`` None leaves one out; ``more`` is the user's, there None is an option without value."""
    given = {key: value for key, value in options.items() if value is not None and key not in more}
    both = {**given, **{key: "" if value is None else value for key, value in more.items()}}
    return [f"#SBATCH --{key}" + ("" if value == "" else f"={value}") for key, value in both.items()]


def array_script(
    settings: Slurm,
    *,
    nodes: int,
    devices: int,
    gpus: int,
    folder: Path,
    code: Path,
    python: str,
    first: int,
    jobs: int,
) -> str:
    """The batch script of an array: task i runs job number ``first + i`` of the launch's folder.

    One SLURM task for each device, as data parallelism wants it. ``code`` goes before everything else on Python's path
    and the working directory not at all (-P): it stays where the command was given, for relative paths.
    """
    options = {
        **settings.common(),
        "time": settings.time,
        "nodes": nodes,
        "ntasks-per-node": devices,
        "cpus-per-task": settings.cpus_per_task,
        "gpus-per-node": (gpus if settings.gpus_per_node is None else settings.gpus_per_node) or None,
        "mem": settings.mem,
        "array": f"0-{jobs - 1}%{settings.array_parallelism}",
        "signal": f"USR2@{settings.signal_seconds}",
        "requeue": "",
        "open-mode": "append",
        "output": folder / "%A_%a.log",
    }
    srun = shlex.join(["srun", "--kill-on-bad-exit=1", *settings.srun, python, "-P", "-m", "sweeps.job", str(folder)])
    return "\n".join(
        [
            "#!/bin/bash",
            *header(options, settings.options),
            *settings.setup,
            f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",  # some versions do not hand it on by themselves
            "trap : TERM  # live on to see how the run ended",
            f"{srun} $(({first} + SLURM_ARRAY_TASK_ID))",
            "code=$?",
            f'if [ $code = {STOPPED} ] && [ "$(squeue -h -j $SLURM_JOB_ID -o %T)" = RUNNING ]; then',
            "  scontrol requeue $SLURM_JOB_ID",
            "fi",
            "exit $code",
            "",
        ]
    )


def follow_script(settings: Slurm, *, name: str, jobs: Sequence[str], log: Path, code: Path, command: list[str]) -> str:
    """The batch script that repeats a command when jobs have ended, however they ended.

    ``singleton``: of several of one name one runs at a time, and the later ones see what the first has submitted.
    """
    arrays = sorted({job.partition("_")[0] for job in jobs}, key=int)
    options = {
        **settings.common(),
        "job-name": name,
        "ntasks": 1,
        "dependency": f"afterany:{':'.join(arrays)},singleton",
        "open-mode": "append",
        "output": log,
    }
    return "\n".join(
        [
            "#!/bin/bash",
            *header(options, settings.follow_options),
            *settings.setup,
            f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
            shlex.join(command),
            "",
        ]
    )


def clean_environment() -> dict[str, str]:
    """The environment without what a surrounding job has set: its limits would hold for the new job as well.

    SLURM_CONF stays: it says where the cluster is. Outside a job all of SLURM's variables are the user's own.
    """
    inside = "SLURM_JOB_ID" in os.environ
    return {
        key: value
        for key, value in os.environ.items()
        if key not in RANKS and (key == "SLURM_CONF" or not (inside and key.startswith(INHERITED)))
    }


def _need(program: str) -> None:
    if shutil.which(program) is None:
        raise SlurmError(
            f"hydra/launcher=slurm: there is no {program} on this machine; run this where jobs are submitted"
        )


def sbatch(script: Path) -> str:
    """Submit a script from the working directory; returns the job's id. Raises SlurmError with SLURM's words."""
    _need("sbatch")
    command = ["sbatch", "--parsable", f"--chdir={Path.cwd()}", str(script)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SlurmError(f"sbatch refused {script}: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]  # a federation adds the cluster's name


@dataclass(frozen=True)
class Queued:
    """A job in SLURM's queue: ``state`` as PENDING, ``reason`` as Resources, or the node of a running one."""

    state: str
    reason: str
    name: str


def queue() -> dict[str, Queued]:
    """The user's jobs that wait, run or end, by id (array tasks as 12_3). Raises SlurmError where SLURM does not answer.

    Only squeue: a job that is not in it has ended, and its run's folder tells how.
    """
    _need("squeue")
    command = ["squeue", "-h", "-r", "-a", f"--user={os.getuid()}", "-o", "%i|%T|%R|%j"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SlurmError(f"squeue does not answer: {' '.join(done.stderr.split())}")
    rows = [line.split("|", 3) for line in done.stdout.splitlines()]
    return {job: Queued(state, reason.strip("()"), name) for job, state, reason, name in rows}


def is_here() -> bool:
    """Is this a machine that can ask SLURM?"""
    return shutil.which("squeue") is not None
