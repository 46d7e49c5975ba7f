"""What an evaluation suite is: one file in `evals/` with a config and a function, one YAML in `conf/suite/`.

    python eval.py run=<run folder> suite=[perplexity,positions]

Each suite's result is one JSON file in the run's folder, ``eval/<suite>-<hash>.json``, with the exact settings that made it;
the same command again skips what is there. Inside a suite, finished parts are kept, so that a killed one goes on.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from data.dataset import Dataset
from models.lm import LanguageModel
from runs.folder import read_json, write_atomic
from runs.identity import ROOT, code_hashes, digest, hash_files
from runs.schema import Config

log = logging.getLogger(__name__)

T = TypeVar("T", bound=type)

MODULES = {"speed": "throughput"}
"""Suites whose module has another name; `evals/speed/` compares operations with other libraries."""

SUITES: dict[str, tuple[type, Callable[..., Result]]] = {}


@dataclass
class Result:
    """What a suite found. Numbers that do not exist for a model are None, and ``reasons`` says why."""

    metrics: dict[str, float | None] = field(default_factory=dict)  # flat, as in run.json: names/with=slices
    reasons: dict[str, str] = field(default_factory=dict)  # metric -> why it is None
    tables: dict[str, Any] = field(default_factory=dict)  # curves and the like, plain values
    record: dict[str, Any] = field(
        default_factory=dict
    )  # what run.json gets, for the report; of the last checkpoint only


@dataclass
class Subject:
    """A trained model at one checkpoint, and how to run it."""

    name: str
    config: Config
    dataset: Dataset
    model: LanguageModel
    step: int
    batch: int = 32  # sequences in one parallel pass
    recurrent_batch: int = 256  # sequences side by side where tokens go one by one
    cache: Path = Path(".cache")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def rows(self, mode: str) -> int:
        """Sequences at once in a mode."""
        return self.recurrent_batch if mode == "recurrent" else self.batch


class Parts:
    """Finished parts of a suite, one JSON file: what a killed evaluation need not do again."""

    def __init__(self, path: Path | None):
        self.path = path
        self._done: dict[str, Any] = read_json(path) if path is not None else {}

    def __call__(self, key: str, compute: Callable[[], Any]) -> Any:
        """The value of a part (plain values), computed if it is not there yet."""
        if key not in self._done:
            begin = time.perf_counter()
            self._done[key] = compute()
            if self.path is not None:
                write_atomic(self.path, json.dumps(self._done))
                log.info("  %s: %.1f s", key, time.perf_counter() - begin)
        return self._done[key]

    def clear(self) -> None:
        """Once the result is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def suite(name: str, config: type) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator of ``evaluate(subject, config, parts) -> Result``: makes the suite known by its name."""

    def register(evaluate: Callable[..., Result]) -> Callable[..., Result]:
        SUITES[name] = config, evaluate
        return evaluate

    return register


def find(name: str) -> tuple[type, Callable[..., Result]]:
    """Config class and function of a suite; its module is imported only now. Raises KeyError."""
    if name not in SUITES:
        importlib.import_module(f"evals.{MODULES.get(name, name)}")
    return SUITES[name]


def settings_of(config: Any) -> dict[str, Any]:
    """A suite's settings as its result has them. A run folder (a field with ``metadata={"folder": True}``) is known by its
    name, wherever it lies, and left out where there is none."""
    settings = dataclasses.asdict(config)
    for one in dataclasses.fields(config):
        if one.metadata.get("folder"):
            place = settings.pop(one.name)
            settings |= {} if place is None else {one.name: Path(place).name}
    return settings


def result_file(folder: Path, name: str, settings: dict[str, Any], step: int) -> Path:
    """Where a suite's result goes: equal settings at an equal checkpoint, equal file."""
    return folder / "eval" / f"{name}-{digest({'settings': settings, 'step': step}, 8)}.json"


def code_of(config: Config) -> dict[str, str]:
    """Hashes of the code that makes a result: of the model, as in run.json, and of the evaluations."""
    return {**code_hashes(*config.mixer.kinds()), "evals": hash_files((ROOT / "evals").rglob("*.py"))}


def warn_of_other_code(path: Path, code: dict[str, str]) -> None:
    """Where the result that is there was made by other code than today's."""
    then = read_json(path).get("code", {})
    changed = [part for part in code if then.get(part) != code[part]]
    if changed:
        log.warning("%s was made with other code (%s changed since); to measure anew, delete it", path, " and ".join(changed))  # fmt: skip
