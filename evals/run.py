"""Runs suites on trained runs: what is there is skipped, what fails is told and the rest goes on."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from evals.external import PREFIX, ExternalSettings, open_external
from evals.suite import Parts, Subject, find, result_file
from models.config import at_least, one_of
from runs import checkpoints
from runs.folder import RunFolder, write_atomic
from runs.host import describe, git_commit
from runs.identity import ROOT
from runs.load import load_model, load_run
from runs.validate import ConfigError, typed, unknown_key

log = logging.getLogger(__name__)


@dataclass
class Settings:
    """The keys of `conf/eval.yaml` beside the suites."""

    run: Any = "???"
    checkpoint: str = "last"
    device: str = "cpu"
    batch: int = 32
    recurrent_batch: int = 256
    threads: int | None = None
    logger: str = "none"
    cache: str = ".cache"
    external: ExternalSettings = field(default_factory=ExternalSettings)
    folders: list[str] = field(default_factory=list)

    def check(self, path: str) -> None:
        one_of("checkpoint", self.checkpoint, ("last", "all"))
        one_of("device", self.device, ("cpu", "cuda"))
        one_of("logger", self.logger, ("none", "offline", "online"))
        for name in ("batch", "recurrent_batch", "threads"):
            at_least(name, getattr(self, name), 1)
        self.external.check("external")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device=cuda: torch {torch.__version__} sees no CUDA device here; use device=cpu")
        self.folders = [str(folder) for folder in (self.run if isinstance(self.run, list) else [self.run])]


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
    good = True
    for run in settings.folders:
        for folder, subject in _external(run, settings) if run.startswith(PREFIX) else _subjects(Path(run), settings):
            for name, (config, function) in chosen.items():
                good &= _one(folder, subject, name, config, function)
    return good


def _subjects(folder: Path, settings: Settings) -> list[tuple[Path, Subject]]:
    trained = load_run(folder)
    found = [(trained.model, trained.step)]
    if settings.checkpoint == "all":
        for path in checkpoints.kept(folder):
            content = checkpoints.load(path)
            if content["global_step"] != trained.step:
                model = load_model(trained.config, trained.dataset, path)
                found.append((model, int(content["global_step"])))
    options = _options(settings)
    return [
        (
            folder,
            Subject(folder.name, trained.config, trained.dataset, model.to(settings.device).eval(), step, **options),
        )
        for model, step in sorted(found, key=lambda pair: pair[1])
    ]


def _external(run: str, settings: Settings) -> list[tuple[Path, Subject]]:
    """A model that was not trained here, and the folder of its results."""
    try:
        name, config, dataset, model = open_external(run, settings.external, settings.cache)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    subject = Subject(name, config, dataset, model.to(settings.device).eval(), 0, **_options(settings))
    return [(settings.external.folder(name), subject)]


def _options(settings: Settings) -> dict[str, Any]:
    return {
        "batch": settings.batch,
        "recurrent_batch": settings.recurrent_batch,
        "cache": Path(settings.cache),
    }


def _one(folder: Path, subject: Subject, name: str, config: Any, function: Any) -> bool:
    settings = asdict(config)
    path = result_file(folder, name, settings, subject.step)
    if path.exists():
        log.info("%s, step %d, %s: is there (%s)", subject.name, subject.step, name, path)
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = Parts(path.with_suffix(".parts"))
    begin = time.perf_counter()
    log.info("%s, step %d: %s", subject.name, subject.step, name)
    try:
        result = function(subject, config, parts)
    except (ValueError, RuntimeError, OSError) as error:
        log.error("%s, step %d, %s failed: %s: %s", subject.name, subject.step, name, type(error).__name__, error)
        return False
    content = {
        "suite": name,
        "settings": settings,
        "run": subject.name,
        "step": subject.step,
        "modes": list(subject.model.modes),
        **{key: value for key, value in asdict(result).items() if key != "record"},
        "commit": git_commit(ROOT),
        "seconds": round(time.perf_counter() - begin, 1),
        **describe(subject.config, torch.get_num_threads()),
    }
    write_atomic(path, json.dumps(content, indent=1) + "\n")
    parts.clear()
    if result.record and subject.step == subject.config.steps:
        RunFolder(folder).set_record(**result.record)
    shown = ", ".join(f"{key} {value:.4f}" for key, value in list(result.metrics.items())[:8] if value is not None)
    log.info("%s, step %d, %s: %s (%s)", subject.name, subject.step, name, shown or "nothing to measure", path)
    for metric, reason in result.reasons.items():
        log.info("%s, %s: %s is n/a: %s", subject.name, name, metric, reason)
    return True
