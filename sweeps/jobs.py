"""From a study to its runs: what the command line narrows, the jobs, and the folder of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runs import identity
from runs.cli import explain
from runs.folder import RunFolder, read_json
from runs.validate import ConfigError, validate
from sweeps import slurm
from sweeps.slurm import Queued
from sweeps.study import Point, Study

# ---- overrides -------------------------------------------------------------------------------------------------------

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_/-]*")
_WORDS = ("true", "false", "null", "nan", "inf")


def literal(value: Any) -> str:
    """A value as Hydra's override grammar reads it back: ``null``, ``true``, 0.003, ``'a, b'``, ``[1,x]``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
            return value
        return QuotedString(value, Quote.single).with_quotes()
    if isinstance(value, list):
        return f"[{','.join(map(literal, value))}]"
    return repr(value)


def as_overrides(values: dict[str, Any]) -> list[str]:
    """``key=value`` for each."""
    return [f"{key}={literal(value)}" for key, value in values.items()]


# ---- what the command line asks for ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """The part of a study that a command runs. ``common`` are the overrides that every job gets."""

    mixers: list[str]
    seeds: list[int]
    common: list[str]

    def __contains__(self, job: Job) -> bool:
        """``seed=`` does not narrow the tune phase: without all of its runs there is nothing to choose."""
        return job.mixer in self.mixers and (job.phase == "tune" or job.seed in self.seeds)


def select(study: Study, arguments: list[str], config_loader: ConfigLoader) -> Selection:
    """``mixer=`` and ``seed=`` narrow the study; everything else is handed to every job. Raises ConfigError."""
    overrides = OverridesParser.create(config_loader=config_loader).parse_overrides(arguments)
    mixers, seeds, common = list(study.mixers), list(study.seeds), []
    for override in overrides:
        key = override.get_key_element()
        if key == "mixer":
            mixers = _narrowed(override, list(study.mixers), f"is not in study {study.name}", "Its mixers")
        elif key == "seed":
            known = {str(seed): seed for seed in study.seeds}
            more = f"To run others: study.seeds=[...]. The seeds of study {study.name}"
            seeds = [known[seed] for seed in _narrowed(override, list(known), "is not a seed of the study", more)]
        else:
            _check_common(override, key, study)
            common.append(str(override.input_line))
    return Selection(mixers, seeds, common)


def _narrowed(override: Override, known: list[str], problem: str, listed: str) -> list[str]:
    if override.value_type == ValueType.INTERVAL_SWEEP:
        raise ConfigError(f"{override.input_line}: an interval cannot narrow a study; list the values")
    if override.is_sweep_override():
        asked = list(override.sweep_string_iterator())
    else:
        asked = [override.get_value_element_as_str()]
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:  # of all choices; here it means those of the study
        asked = [value for value in asked if value in known]
    for value in asked:
        if value not in known:
            key = override.get_key_element()
            raise ConfigError(f"{key}={value} {problem}. {listed}: {', '.join(known)}")
    if not asked:
        raise ConfigError(f"{override.input_line}: nothing in the study fits. {listed}: {', '.join(known)}")
    return [value for value in known if value in asked]  # in the study's order


def _check_common(override: Override, key: str, study: Study) -> None:
    if override.is_sweep_override():
        raise ConfigError(
            f"{override.input_line}: a study has its own grids; only mixer= and seed= may be swept beside study=. "
            f"A mixer's grid is study.mixers.<mixer>.{key}=[...]"
        )
    plain = key.lstrip("+~")
    if plain in ("study.phase", "study.label"):
        raise ConfigError(
            f"{override.input_line}: phase and label are set by the sweeper; leave it out, or add hydra.mode=RUN"
        )
    owners = [mixer for mixer, grid in study.mixers.items() if plain in grid]
    if owners:
        raise ConfigError(
            f"{override.input_line}: study {study.name} sets {plain} from its grids ({', '.join(owners)}), so this "
            f"would have no effect there. Override the grid: study.mixers.{owners[0]}.{plain}=[...]"
        )


# ---- jobs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    phase: str
    mixer: str
    point: Point
    seed: int
    base: str | None = None  # the name in `conf/mixer` where ``mixer`` is a study's name for a variant of it

    def overrides(self) -> list[str]:
        """What it adds to the overrides that all jobs share."""
        return [
            f"mixer={literal(self.base or self.mixer)}",
            *as_overrides(self.point),
            f"seed={self.seed}",
            *([f"study.label={literal(self.mixer)}"] if self.base else []),
            f"study.phase={self.phase}",
        ]

    def __str__(self) -> str:
        return " ".join(self.overrides()[:-1])


def tune_jobs(study: Study) -> list[Job]:
    """Every point of every grid that leaves a choice, with each tune seed."""
    return [
        Job("tune", mixer, point, seed, study.variants.get(mixer))
        for mixer in study.mixers
        if study.tune is not None and study.is_tuned(mixer)
        for point in study.points(mixer)
        for seed in study.tune.seeds
    ]


def seed_jobs(study: Study, points: dict[str, Point]) -> list[Job]:
    """The chosen points with each seed; nothing for a mixer that has none yet."""
    return [
        Job("seeds", mixer, points[mixer], seed, study.variants.get(mixer))
        for mixer in study.mixers
        if mixer in points
        for seed in study.seeds
    ]


# ---- folders ---------------------------------------------------------------------------------------------------------


class Run:
    """A job and the folder that its config leads to."""

    def __init__(self, job: Job, folder: RunFolder):
        self.job, self.folder = job, folder

    @property
    def name(self) -> str:
        """<mixer>-<run_id>"""
        return self.folder.path.name

    def state(self, queue: Mapping[str, Queued] | None = None) -> str:
        """See `state_of`."""
        return state_of(self.folder, queue)

    def job_note(self) -> dict[str, Any]:
        """``job``, ``log`` and ``submitted`` of the SLURM job that was last submitted for this run; {} for none."""
        return job_note(self.folder)

    def error(self) -> str | None:
        """The error of a failed run."""
        return self.folder.status().get("error")

    def metric(self, name: str) -> float | None:
        """A figure of a finished run. Raises ConfigError if it has no such metric."""
        metrics = self.folder.record().get("metrics") or {}
        if name not in metrics:
            known = ", ".join(sorted(key for key in metrics if key.startswith("val/")))
            raise ConfigError(f"study.tune.metric={name}: {self.name} has no such metric. It has: {known}")
        return metrics[name]


def job_note(folder: RunFolder) -> dict[str, Any]:
    """``job.json`` of a run folder, see `Run.job_note`."""
    return read_json(folder.path / "job.json")


def state_of(folder: RunFolder, queue: Mapping[str, Queued] | None = None) -> str:
    """``missing`` (never started), ``queued`` (in SLURM's queue), ``running`` (its lock is held), ``done``, ``failed``,
    ``preempted``, or ``lost`` (killed while running). Without ``queue`` nothing is queued."""
    status, job = folder.status(), job_note(folder)
    state = status.get("state", "missing")
    entry = (queue or {}).get(job.get("job", ""))
    # What ended before this job was submitted is the reason why it was; what SLURM requeued will run again.
    again = entry is not None and (entry.state == "PENDING" or status.get("heartbeat", 0) < job["submitted"])
    if state == "done" or (state == "failed" and not again):
        return state
    if folder.is_locked():
        return "running"
    if entry is not None:  # a lock on another node may not be seen from here
        return "running" if state == "running" and entry.state == "RUNNING" and not again else "queued"
    return "lost" if state == "running" else state


def states(runs: Sequence[Run]) -> list[str]:
    """The state of each run, with one look at SLURM's queue where any was ever submitted. Raises SlurmError."""
    queue = slurm.queue() if slurm.is_here() and any(run.job_note() for run in runs) else None
    return [run.state(queue) for run in runs]


class Locator:
    """Composes and validates jobs and finds their folders.

    Composing takes Hydra about 0.1 s, so jobs that differ only in dotted keys and the seed share one composition; the
    values are set into it by the call with which Hydra itself applies such overrides. Keys without a dot may be config
    groups, which change what is composed: for those there is no short cut.
    """

    def __init__(self, study: str, common: list[str], compose: Callable[[list[str]], DictConfig]):
        self.study, self.common, self.compose = study, common, compose
        self._composed: dict[str, DictConfig] = {}

    def overrides(self, job: Job) -> list[str]:
        """All overrides of a job, as for a launcher."""
        return [*self.common, *job.overrides()]

    def config(self, job: Job) -> DictConfig:
        """The job's composed config, without Hydra's part. Valid until the next call."""
        values = {key: value for key, value in job.point.items() if "." in key and "@" not in key}
        groups = {key: value for key, value in job.point.items() if key not in values}
        key = " ".join([job.mixer, *as_overrides(groups)])
        if key in self._composed:
            config = self._composed[key]
            try:
                for name, value in {**values, "seed": job.seed, "study.phase": job.phase}.items():
                    OmegaConf.update(config, name, value, merge=True)
                return config
            except OmegaConfBaseException:
                del self._composed[key]  # half set; Hydra says below what is wrong
        whole = self.compose(self.overrides(job))
        config = OmegaConf.masked_copy(whole, [str(name) for name in whole if name != "hydra"])
        self._composed[key] = config
        return config

    def __call__(self, job: Job) -> Run:
        """Raises ConfigError that names study and mixer, for whatever is wrong with the job."""
        try:
            config = self.config(job)
            me = identity.identify(config, validate(config), job.base or job.mixer)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"study {self.study}, {job}: {explain(error)}") from None
        return Run(job, RunFolder(me.folder))
