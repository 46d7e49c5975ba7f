"""From composed configs to submitted array jobs, and the job that repeats a study's command after them."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from runs.folder import RunFolder, write_atomic
from runs.identity import ROOT, canonical, digest, identify
from runs.validate import ConfigError, validate
from sweeps import slurm
from sweeps.jobs import state_of
from sweeps.slurm import Queued, Slurm
from sweeps.snapshot import snapshot

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
AFTER, TRIES = "hydra.sweeper.after", "hydra.sweeper.tries"
"""What the command of a following job has beside the user's own."""


@dataclass(frozen=True)
class Prepared:
    """One run: its composed config, its folder, and what it asks SLURM for."""

    config: DictConfig
    folder: RunFolder
    settings: Slurm
    shape: tuple[int, int, int]  # nodes, devices of each, GPUs of each

    @classmethod
    def of(cls, config: DictConfig) -> Prepared:
        """Raises ConfigError for whatever is wrong with it: a job should not wait in a queue for that."""
        settings = Slurm.parse(OmegaConf.to_container(config.hydra.launcher, resolve=True))  # type: ignore[arg-type]
        science = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
        checked = validate(science)
        if checked.study is not None and not checked.study.get("phase"):
            name = checked.study["name"]
            raise ConfigError(f"study={name}: a study is not one run. Start it as: python train.py study={name}")
        me = identify(science, checked, config.hydra.runtime.choices["mixer"])
        trainer = checked.trainer
        gpus = trainer.devices if trainer.accelerator == "gpu" else 0
        return cls(config, RunFolder(me.folder), settings, (trainer.nodes, trainer.devices, gpus))

    @property
    def group(self) -> str:
        """Runs of one array must ask for the same."""
        return canonical([vars(self.settings), self.shape])


def submit(configs: Sequence[DictConfig], results: Path) -> list[str]:
    """Submit the runs that are neither finished nor queued; returns the ids of their jobs."""
    runs = list(map(Prepared.of, configs))
    queue = slurm.queue()
    runs = [run for run in runs if not _is_settled(run.folder, queue)]
    if not runs:
        return []
    code = code_for(runs[0].settings, results)
    folder = _new_folder(results)
    groups: dict[str, list[Prepared]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    jobs: list[str] = []
    for group in groups.values():
        for start in range(0, len(group), slurm.ARRAY_SIZE):
            jobs += _submit_array(group[start : start + slurm.ARRAY_SIZE], folder, code, first=len(jobs))
    return jobs


def _submit_array(runs: list[Prepared], folder: Path, code: Path, first: int) -> list[str]:
    settings, (nodes, devices, gpus) = runs[0].settings, runs[0].shape
    for number, run in enumerate(runs, start=first):
        OmegaConf.save(run.config, folder / f"{number}.yaml")
    script = folder / f"array-{first}.sh"
    python = settings.python or sys.executable
    text = slurm.array_script(
        settings,
        nodes=nodes,
        devices=devices,
        gpus=gpus,
        folder=folder,
        code=code,
        python=python,
        first=first,
        jobs=len(runs),
    )
    script.write_text(text)
    array = slurm.sbatch(script)
    jobs = [f"{array}_{index}" for index in range(len(runs))]
    for job, run in zip(jobs, runs, strict=True):
        note_job(run.folder.path, job, log=folder / f"{job}.log")
    log.info("submitted %d jobs: array %s (%s; to stop them: scancel %s)", len(runs), array, folder, array)
    return jobs


def note_job(path: Path, job: str, log: Path) -> None:
    """``job.json`` of a run folder: which job has this run, and where it writes. A file beside ``status.json``, which
    belongs to the job: it may have started already."""
    path.mkdir(parents=True, exist_ok=True)
    write_atomic(path / "job.json", json.dumps({"job": job, "log": str(log), "submitted": time.time()}, indent=1))


def _new_folder(results: Path) -> Path:
    """A folder of its own for each launch, also where two begin in one second."""
    launches = results / "launches"
    launches.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%d_%H-%M-%S-"), dir=launches))
    folder.chmod(0o755)
    return folder


def _is_settled(folder: RunFolder, queue: Mapping[str, Queued]) -> bool:
    state = state_of(folder, queue)
    if state in ("done", "running", "queued"):
        log.info("%s is %s: not submitted", folder.path.name, "finished" if state == "done" else state)
    return state in ("done", "running", "queued")


def code_for(settings: Slurm, results: Path) -> Path:
    """Where jobs have their code from."""
    return snapshot(ROOT, results / "launches" / "code", results) if settings.snapshot else ROOT


def wait(jobs: Iterable[str]) -> None:
    """Until none of these jobs is in the queue any more."""
    left = set(jobs)
    while left := left & set(slurm.queue()):
        time.sleep(POLL_SECONDS)


# ---- what follows ----------------------------------------------------------------------------------------------------


def given(config: DictConfig) -> list[str]:
    """The overrides that a person typed, Hydra's own included."""
    words = [str(word) for key in ("hydra", "task") for word in config.hydra.overrides[key]]
    return [word for word in words if not word.startswith((f"{AFTER}=", f"{TRIES}="))]


def follow(
    settings: Slurm, results: Path, overrides: list[str], jobs: Sequence[str], *, after: str, tries: int, fresh: bool
) -> str:
    """Submit ``python train.py <overrides>`` once more for when ``jobs`` have ended; returns the id of its job.

    ``fresh`` says that some of the jobs were submitted just now. If not, and if the same command is waiting already,
    that one is enough.
    """
    name = f"{settings.name}-next-{digest(overrides, 8)}"
    if not fresh:
        for job, entry in slurm.queue().items():
            if entry.name == name and job != os.environ.get("SLURM_JOB_ID"):
                return job
    code = code_for(settings, results)
    folder = _new_folder(results)
    command = [settings.python or sys.executable, "-P", str(code / "train.py"), *overrides]
    script = folder / "next.sh"
    text = slurm.follow_script(
        settings,
        name=name,
        jobs=jobs,
        log=folder / "next.log",
        code=code,
        command=[*command, f"{AFTER}={after}", f"{TRIES}={tries}"],
    )
    script.write_text(text)
    return slurm.sbatch(script)
