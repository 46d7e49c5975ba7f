"""Runs suites on trained runs: what is there is skipped, what fails is told and the rest goes on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from evals import plots, publish, targets
from evals.external import PREFIX, ExternalSettings, open_external
from evals.suite import Parts, Subject, code_of, find, result_file, settings_of, warn_of_other_code
from models.config import at_least, one_of
from runs.folder import RunFolder, write_atomic
from runs.host import describe, git_commit
from runs.identity import ROOT
from runs.schema import Logger
from runs.validate import ConfigError, typed, unknown_key

log = logging.getLogger(__name__)


@dataclass
class Settings:
    """The keys of `conf/eval.yaml` beside the suites."""

    run: Any = "???"
    results: str = "results"
    mixers: list[str] | None = None
    checkpoint: str = "last"
    device: str = "cpu"
    batch: int = 32
    recurrent_batch: int = 256
    threads: int | None = None
    logger: Logger = field(default_factory=Logger)
    cache: str = ".cache"
    external: ExternalSettings = field(default_factory=ExternalSettings)
    folders: list[str] = field(default_factory=list)  # what `run` names, studies as their runs

    def check(self, path: str) -> None:
        one_of("checkpoint", self.checkpoint, ("last", "all"))
        one_of("device", self.device, ("cpu", "cuda"))
        self.logger.check("logger")
        if self.logger.diagnostics:
            raise ValueError(
                "logger.diagnostics=true: is for training; the suites of eval.py look inside in their own ways"
            )
        for name in ("batch", "recurrent_batch", "threads"):
            at_least(name, getattr(self, name), 1)
        self.external.check("external")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device=cuda: torch {torch.__version__} sees no CUDA device here; use device=cpu")
        named = [str(one) for one in (self.run if isinstance(self.run, list) else [self.run])]
        if self.mixers is not None and not any(one.startswith(targets.STUDY) for one in named):
            raise ValueError(f"mixers={self.mixers}: narrows a study, and none is named; use study=<name>")
        found: list[str] = []
        for one in named:
            if one.startswith(targets.STUDY):
                runs, lacking = targets.runs_of_study(Path(self.results), one.removeprefix(targets.STUDY), self.mixers)
                if lacking:
                    log.warning("%s: left out, since not finished: %s", one, ", ".join(lacking))
                found += map(str, runs)
            else:
                found.append(one)
        self.folders = list(dict.fromkeys(found))
        for one in self.folders:
            if not one.startswith(PREFIX):
                targets.check_folder("run", Path(one))


def evaluate(cfg: DictConfig) -> bool:
    """Every suite on every run and checkpoint. Everything is checked before anything starts; False if a suite failed."""
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    plain.pop("hydra", None)
    suites = plain.pop("suite", None) or {}
    if not suites:
        raise ConfigError("suite=[]: name at least one suite, as in suite=[perplexity,positions]")
    settings = typed(Settings, plain, "", "eval.py")
    chosen: dict[str, tuple[Any, Any]] = {}
    for name, node in suites.items():
        try:
            config_class, function = find(name)
        except (KeyError, ModuleNotFoundError):
            raise ConfigError(
                unknown_key(f"suite.{name}", [p.stem for p in (ROOT / "conf" / "suite").glob("*.yaml")])
            ) from None
        chosen[name] = typed(config_class, node, f"suite.{name}", f"suite {name}"), function
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    good, begin = True, time.perf_counter()
    for number, run in enumerate(settings.folders, start=1):
        if len(settings.folders) > 1:
            since = time.perf_counter() - begin
            log.info("run %d of %d, after %.0f s: %s", number, len(settings.folders), since, Path(run).name)
        try:
            good &= _run(run, settings, chosen)
        except (ConfigError, RuntimeError, OSError) as error:
            if len(settings.folders) == 1:
                raise
            log.error("%s failed: %s: %s", run, type(error).__name__, error)
            good = False
    return good


def _run(run: str, settings: Settings, chosen: dict[str, tuple[Any, Any]]) -> bool:
    """All suites on all checkpoints of one run, then Weights & Biases."""
    found: Iterable[Subject]
    if run.startswith(PREFIX):
        folder, subject = _external(run, settings)
        found = [subject]
    else:
        folder = Path(run)
        found = targets.subjects(folder, settings.device, settings.checkpoint, **_options(settings))
    results = [_one(folder, subject, name, *suite) for subject in found for name, suite in chosen.items()]
    made = [path for path in results if path is not None]
    if made:
        publish.publish(folder, made, settings.logger)
    return len(made) == len(results)


def _external(run: str, settings: Settings) -> tuple[Path, Subject]:
    """A model that was not trained here, and the folder of its results."""
    try:
        name, config, dataset, model = open_external(run, settings.external, settings.cache)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    subject = Subject(name, config, dataset, model.to(settings.device).eval(), 0, **_options(settings))
    return settings.external.folder(name), subject


def _options(settings: Settings) -> dict[str, Any]:
    return {
        "batch": settings.batch,
        "recurrent_batch": settings.recurrent_batch,
        "cache": Path(settings.cache),
    }


def _one(folder: Path, subject: Subject, name: str, config: Any, function: Any) -> Path | None:
    """One suite on one checkpoint: the file of its result; None where it failed."""
    settings = settings_of(config)
    path, code = result_file(folder, name, settings, subject.step), code_of(subject.config)
    if path.exists():
        warn_of_other_code(path, code)
        log.info("%s, step %d, %s: is there (%s)", subject.name, subject.step, name, path)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = Parts(path.with_suffix(".parts"))
    begin = time.perf_counter()
    log.info("%s, step %d: %s", subject.name, subject.step, name)
    try:
        result = function(subject, config, parts)
    except (ValueError, RuntimeError, OSError) as error:
        log.error("%s, step %d, %s failed: %s: %s", subject.name, subject.step, name, type(error).__name__, error)
        return None
    content = {
        "suite": name,
        "settings": settings,
        "run": subject.name,
        "step": subject.step,
        "modes": list(subject.model.modes),
        **{key: value for key, value in asdict(result).items() if key != "record"},
        "commit": git_commit(ROOT),
        "code": code,
        "seconds": round(time.perf_counter() - begin, 1),
        **_where(subject),
    }
    write_atomic(path, json.dumps(content, indent=1) + "\n")
    parts.clear()
    if result.record and subject.step == subject.config.steps:
        RunFolder(folder).set_record(**result.record)
    shown = ", ".join(f"{key} {value:.4f}" for key, value in list(result.metrics.items())[:8] if value is not None)
    log.info("%s, step %d, %s: %s (%s)", subject.name, subject.step, name, shown or "nothing to measure", path)
    for metric, reason in result.reasons.items():
        log.info("%s, %s: %s is n/a: %s", subject.name, name, metric, reason)
    plots.draw([path])
    return path


def _where(subject: Subject) -> dict[str, Any]:
    """Hardware and versions. The GPU is the one that this evaluation used, whatever the run was trained on."""
    facts = describe(subject.config, torch.get_num_threads())
    gpu = torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else None
    return {**facts, "hardware": {**facts["hardware"], "gpu": gpu, "devices": 1}}
