"""Which runs a command stands for: those of a study, or of a plain multirun, composed by Hydra as `train.py` would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runs.cli import explain
from runs.schema import Config
from runs.validate import CONF, ConfigError, reference, validate
from sweeps.jobs import Locator, as_overrides, seed_jobs, select, tune_jobs
from sweeps.study import Point, Study


@dataclass(frozen=True)
class Planned:
    """Runs of one config, its seed apart. ``other`` is the config whose budget it has to meet (``match``)."""

    mixer: str  # the name of its YAML file
    config: Config
    other: Config | None
    n_runs: int = 1
    point: Point = field(default_factory=dict)  # what it has beside its mixer


@dataclass(frozen=True)
class Plan:
    """All runs of a command; ``reference`` is the mixer that the others are compared with."""

    name: str
    reference: str
    runs: list[Planned]
    n_tuning: int = 0  # of the runs, those of the tune phase


@contextmanager
def _hydra() -> Iterator[ConfigLoaderImpl]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        yield loader


def read(words: Sequence[str]) -> Plan:
    """The runs behind the overrides of a command line. Raises ConfigError, one sentence."""
    with _hydra() as loader:
        try:
            first = compose("config", [word for word in words if _is_study(word)])
            if first.get("study") is not None:
                return _of_study(list(words), loader)
            return _of_multirun(list(words), loader)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error)) from None


def _is_study(word: str) -> bool:
    return word.startswith(("study=", "hydra.searchpath="))


def _checked(cfg: DictConfig) -> tuple[Config, Config | None]:
    config = validate(cfg)
    return config, reference(cfg, config) if config.match != "none" else None


def _of_study(words: list[str], loader: ConfigLoaderImpl) -> Plan:
    """One entry for each mixer and point, with as many runs as its seeds in both phases.

    Which point will be chosen is not known: the runs of the second phase are spread over the points alike.
    """
    # Only what belongs to the study itself is composed here; the rest may not fit its first mixer.
    own = [word for word in words if _is_study(word) or word.startswith("study.")]
    node = OmegaConf.to_container(compose("config", own).study)
    assert isinstance(node, dict)
    study = Study.parse({str(key): value for key, value in node.items()})
    selection = select(study, words, loader)
    locate = Locator(study.name, selection.common, lambda overrides: compose("config", overrides))
    tuning = [job for job in tune_jobs(study) if job in selection]
    runs = []
    for mixer in selection.mixers:
        points = study.points(mixer)
        for point in points:
            seeds = [job for job in seed_jobs(study, {mixer: point}) if job in selection]
            tried = [job for job in tuning if (job.mixer, job.point) == (mixer, point)]
            try:
                config, other = _checked(locate.config(seeds[0]))
            except (HydraException, OmegaConfBaseException) as error:
                raise ConfigError(f"study {study.name}, {seeds[0]}: {explain(error)}") from None
            runs.append(Planned(mixer, config, other, len(tried) + len(seeds) / len(points), point))  # type: ignore[arg-type]
    return Plan(study.name, study.reference, runs, len(tuning))


def _of_multirun(words: list[str], loader: ConfigLoaderImpl) -> Plan:
    """One entry for each combination of the swept values (``mixer=a,b``), seeds together."""
    swept: list[list[tuple[str, str]]] = []
    plain: list[str] = []
    seeds = 1
    for override in OverridesParser.create(config_loader=loader).parse_overrides(words):
        key = override.get_key_element()
        if not override.is_sweep_override():
            plain.append(str(override.input_line))
        elif key == "seed":
            seeds = len(list(override.sweep_string_iterator()))
        else:
            swept.append([(key, value) for value in override.sweep_string_iterator()])
    runs = []
    for values in product(*swept):
        overrides = [*plain, *(f"{key}={value}" for key, value in values)]
        cfg = compose("config", overrides, return_hydra_config=True)
        point: dict[str, Any] = {key: value for key, value in values if key != "mixer"}
        config, other = _checked(cfg)
        runs.append(Planned(cfg.hydra.runtime.choices["mixer"], config, other, seeds, point))
    names = [run.mixer for run in runs]
    named = runs[0].config.match_reference
    reference_name = named if named in names else "transformer" if "transformer" in names else names[0]
    recipe = next((word.partition("=")[2] for word in plain if word.startswith("experiment=")), "runs")
    return Plan(recipe, reference_name, runs)


def label(mixer: str, point: Point, points: Sequence[Point]) -> str:
    """The mixer's name, with what sets this point apart from the others of the mixer."""
    apart = {key: value for key, value in point.items() if any(other.get(key) != value for other in points)}
    return " ".join([mixer, *as_overrides(apart)])
