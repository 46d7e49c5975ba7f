"""What a study says, checked, and the choice of the best point. Light imports: no torch.

A study is a file ``sweeps/<name>.yaml``; ``sweeps/quickstart.yaml`` explains each of its keys. `as_config` turns the
file into the Hydra config behind ``study=<name>``; `Study.parse` reads that config back, command line included.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runs.identity import HOST, ROOT, SEEDS, canonical, flatten
from runs.validate import ConfigError, unknown_key

FILE_KEYS = ("description", "like", "shared", "mixers", "tune", "seeds", "reference", "report", "equal_trials")
PHASES = ("tune", "seeds")

Point = dict[str, Any]
"""One value for each key of a grid, by dotted key."""

# What no grid may vary, by the first part of the key.
_FIXED = {
    **dict.fromkeys(HOST, "it does not change what is computed, so all its values would be one run"),
    "hydra": "it does not change what is computed, so all its values would be one run",
    **dict.fromkeys(SEEDS, "seeds are listed under `seeds` and `tune.seeds`"),
    **dict.fromkeys(("data", "tokenizer", "evaluation"), "what is measured must be equal; set it under `shared`"),
    "global_batch": "the budget must be equal; set it under `shared`",
    **dict.fromkeys(("match", "match_reference", "match_len"), "what is matched must be equal; set it under `shared`"),
    "experiment": "a recipe holds for all mixers; set it under `shared`",
}


@dataclass(frozen=True)
class Tune:
    """How each mixer's point is chosen: the mean of a validation metric over these seeds."""

    seeds: list[int]
    metric: str = "val/bits_per_byte"
    mode: str = "min"


@dataclass(frozen=True)
class Trial:
    """One finished or failed run of the tune phase. ``value`` is the metric, None where there is none."""

    point: Point
    seed: int
    run: str  # name of its folder
    state: str
    value: float | None


@dataclass(frozen=True)
class Study:
    """A checked study. ``mixers`` holds each mixer's grid: dotted key -> list of values.

    A row may be a variant of a mixer under a name of its own; ``variants`` says of which mixer (a name of `conf/mixer`).
    """

    name: str
    mixers: dict[str, dict[str, list]]
    seeds: list[int]
    reference: str
    tune: Tune | None = None
    equal_trials: bool = True
    description: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, node: dict[str, Any], where: str = "study") -> Study:
        """From ``cfg.study`` as plain values. Raises ConfigError: key, value, what would be right.

        ``where`` stands before each key in an error: the file while it is read, ``study`` afterwards.
        """
        node = {key: value for key, value in node.items() if key not in ("phase", "label", "like", "shared")}
        name, variants = node.pop("name"), dict(node.pop("variants", None) or {})
        for key in node:
            if key not in FILE_KEYS:
                raise ConfigError(unknown_key(f"{where}.{key}", list(FILE_KEYS)))
        mixers = node.get("mixers")
        if not isinstance(mixers, dict) or not mixers:
            raise ConfigError(
                f"{where}.mixers={mixers}: must map each mixer to its grid, as in swa: {{mixer.window: [64]}}"
            )
        grids = {}
        for label, grid in ((str(label), grid) for label, grid in mixers.items()):
            if isinstance(grid, dict) and "mixer" in grid and not isinstance(grid["mixer"], dict):
                variants[label] = _base(label, grid["mixer"], f"{where}.mixers.{label}")
                grid = {key: values for key, values in grid.items() if key != "mixer"}
            grids[label] = _grid(grid, f"{where}.mixers.{label}")
        reference = node.get("reference") or next(iter(grids))
        if reference not in grids:
            near = difflib.get_close_matches(str(reference), grids, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{where}.reference={reference}: must be one of the study's mixers.{hint} {', '.join(grids)}"
            )
        report = node.get("report") or {}
        if not isinstance(report, dict):
            raise ConfigError(f"{where}.report={report}: must be a mapping of settings")
        equal = node.get("equal_trials", True)
        if not isinstance(equal, bool):
            raise ConfigError(f"{where}.equal_trials={equal}: must be true or false")
        study = cls(
            name=name,
            mixers=grids,
            seeds=_seeds(node.get("seeds"), f"{where}.seeds"),
            reference=reference,
            tune=_tune(node.get("tune"), f"{where}.tune"),
            equal_trials=equal,
            description=str(node.get("description") or ""),
            report=report,
            variants=variants,
        )
        study._check_trials(where)
        return study

    def _check_trials(self, where: str) -> None:
        sizes = {mixer: len(self.points(mixer)) for mixer in self.mixers}
        listed = ", ".join(f"{mixer} {size}" for mixer, size in sizes.items())
        if self.equal_trials and len(set(sizes.values())) > 1:
            raise ConfigError(
                f"{where}.mixers: unequal numbers of trials ({listed}). Tuning is fair when each mixer gets the same "
                "number; make the grids equally large or set equal_trials: false"
            )
        if self.tune is None and max(sizes.values()) > 1:
            raise ConfigError(
                f"{where}.tune=null: nothing would choose between the grids' points ({listed}). Leave one value per "
                "key, or add tune: {seeds: [100], metric: val/bits_per_byte, mode: min}"
            )

    def base(self, mixer: str) -> str:
        """The name in `conf/mixer` behind a row's name."""
        return self.variants.get(mixer, mixer)

    def points(self, mixer: str) -> list[Point]:
        """All combinations of the values of a mixer's grid, the last key varying fastest."""
        grid = self.mixers[mixer]
        return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]

    def is_tuned(self, mixer: str) -> bool:
        """Is there a choice to make? A grid of one point costs no tuning runs."""
        return self.tune is not None and len(self.points(mixer)) > 1

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def _base(label: str, base: Any, where: str) -> str:
    if not isinstance(base, str):
        raise ConfigError(
            f"{where}.mixer={base}: must be the name of one mixer, of which {label} is a variant; to compare two, give each "
            "a row of its own"
        )
    if not label.replace("-", "").replace(".", "").isidentifier():
        raise ConfigError(f"{where}: a variant's name is its folder's: letters, digits, _, - and dots, as in swa_w64")
    return base


def _grid(node: Any, where: str) -> dict[str, list]:
    if node is not None and not isinstance(node, dict):
        raise ConfigError(f"{where}={node}: must be a grid, as in {{optimizer.lr: [1e-3, 3e-3]}}; {{}} for none")
    grid = flatten(node) if node else {}
    for key, values in grid.items():
        path = f"{where}.{key}"
        first = str(key).replace("/", ".").replace("@", ".").split(".")[0]
        if key == "mixer" or first in _FIXED:
            why = _FIXED.get(first, "a grid belongs to its mixer")
            raise ConfigError(f"{path}={values}: {key} cannot be in a grid: {why}")
        if key in ("steps", "tokens") and isinstance(values, list) and len(values) > 1:
            raise ConfigError(
                f"{path}={values}: a budget is not tuned; give one value, with which this mixer gets another number of steps "
                "than the others (to compare at equal FLOPs)"
            )
        if not str(key).replace("/", ".").replace("@", ".").replace(".", "_").isidentifier():
            raise ConfigError(f"{path}: a grid's key is a config key such as optimizer.lr, without signs or spaces")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}={values}: must be a list of values to try, as in [{values or 1}]")
        for value in values:
            if any(isinstance(leaf, dict) for leaf in (value if isinstance(value, list) else [value])):
                raise ConfigError(
                    f"{path}={values}: values must be numbers, words or lists; give each key its own line"
                )
        if len({canonical(value) for value in values}) < len(values):
            raise ConfigError(f"{path}={values}: a value is there twice")
    return grid


def _seeds(seeds: Any, where: str) -> list[int]:
    good = isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)
    if not good or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{where}={seeds}: must be a list of different whole numbers, as in [0, 1, 2]")
    return seeds


def _tune(node: Any, where: str) -> Tune | None:
    if node is None:
        return None
    if not isinstance(node, dict):
        raise ConfigError(f"{where}={node}: must be null or {{seeds: [100], metric: val/bits_per_byte, mode: min}}")
    for key in node:
        if key not in Tune.__dataclass_fields__:
            raise ConfigError(unknown_key(f"{where}.{key}", list(Tune.__dataclass_fields__)))
    tune = Tune(**{**node, "seeds": _seeds(node.get("seeds"), f"{where}.seeds")})
    if not str(tune.metric).startswith("val/"):
        raise ConfigError(
            f"{where}.metric={tune.metric}: must be a metric of the validation split, such as val/bits_per_byte; the "
            "test split must not choose anything"
        )
    if tune.mode not in ("min", "max"):
        raise ConfigError(f"{where}.mode={tune.mode}: must be min or max")
    return tune


# ---- the file --------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """The content of a study's file as the Hydra config of ``study=<name>``; see `as_config`."""
    return as_config(path.stem, content_of(path), where=str(path))


def content_of(path: Path) -> dict[str, Any]:
    """What a study's file says, with what the study says that it is ``like``."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))  # its YAML reads 3e-3 as a number, PyYAML's as a word
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a mapping with the keys {', '.join(FILE_KEYS)}")
    return _extended(path, {str(key): value for key, value in content.items()})


def _extended(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """With ``like: <study>``: what that file says, and in its place what this one says; ``shared`` key by key."""
    other = content.pop("like", None)
    if other is None:
        return content
    base_path = path.with_name(f"{other}.yaml")
    if not base_path.exists() or base_path == path:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml") if file != path))
        raise ConfigError(f"{path}.like={other}: no such study. Studies: {known}")
    base = OmegaConf.to_container(OmegaConf.load(base_path))
    if not isinstance(base, dict) or "like" in base:
        raise ConfigError(f"{path}.like={other}: {base_path} must be a study that says all of itself, without `like`")
    shared = {**(base.get("shared") or {}), **(content.get("shared") or {})}
    return {**{str(key): value for key, value in base.items()}, **content, "shared": shared}


def as_config(name: str, content: dict[str, Any], where: str = "study") -> dict[str, Any]:
    """Shared group choices as overrides in a defaults list, shared values beside them, the rest under ``study``.

    Everything is filled in, so that Hydra lets each key of the study be overridden on the command line.
    """
    study = Study.parse({"name": name, **content}, where)
    shared = content.get("shared") or {}
    if not isinstance(shared, dict):
        raise ConfigError(f"{where}.shared={shared}: must be a mapping, as in {{model: tiny, steps: 300}}")
    defaults: list[Any] = ["_self_"]
    config = OmegaConf.create({})
    for key, value in ((str(key), value) for key, value in shared.items()):
        if key in ("mixer", "seed", "study", "defaults"):
            right = {"mixer": "`mixers`", "seed": "`seeds`"}.get(key, "a file of its own")
            raise ConfigError(f"{where}.shared.{key}={value}: belongs into {right}")
        if _is_group(key) and not isinstance(value, dict):
            defaults.append({f"override /{key}": value})
        else:
            OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.update(config, "hydra.mode", "MULTIRUN", force_add=True)  # study=<name> alone is enough, without -m
    spec = study.plain()
    spec["mixers"] = {mixer: _nest(grid) for mixer, grid in study.mixers.items()}
    return {
        "defaults": [*defaults, {"override /hydra/sweeper": "study"}],  # Hydra wants overrides last
        **OmegaConf.to_container(config),  # type: ignore[dict-item]
        "study": {**spec, "phase": None, "label": None},
    }


def _is_group(key: str) -> bool:
    return "/" in key or "@" in key or (ROOT / "conf" / key).is_dir()


def _nest(grid: dict[str, list]) -> dict[str, Any]:
    """Dotted keys as nested ones, so that ``study.mixers.swa.mixer.window=[32,64]`` can be said on the command line.

    Left as they are where one key is the beginning of another (``schedule`` and ``schedule.final``).
    """
    if any(other.startswith(f"{key}.") for key in grid for other in grid):
        return dict(grid)
    nested: dict[str, Any] = {}
    for key, values in grid.items():
        *path, last = key.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[last] = values
    return nested


# ---- the choice ------------------------------------------------------------------------------------------------------


def choose(trials: Iterable[Trial], seeds: Iterable[int], mode: str) -> Point | None:
    """The point with the best mean over all tune seeds; of equal ones the first in the grid.

    A point with a failed seed is out: what diverges for one seed in three is no setting to report. None if all are out.
    """
    needed = set(seeds)
    values: dict[str, dict[int, float]] = {}
    points: dict[str, Point] = {}
    for trial in trials:
        key = canonical(trial.point)
        points.setdefault(key, trial.point)
        if trial.value is not None and math.isfinite(trial.value):
            values.setdefault(key, {})[trial.seed] = trial.value
    best, best_mean = None, math.inf
    for key, point in points.items():
        by_seed = values.get(key, {})
        if needed <= set(by_seed):
            mean = math.fsum(by_seed.values()) / len(by_seed) * (1 if mode == "min" else -1)
            if mean < best_mean:
                best, best_mean = point, mean
    return best


def at_edge(point: Point, grid: dict[str, list]) -> dict[str, str]:
    """Numeric keys whose chosen value is the ``smallest`` or ``largest`` tried: a better one may lie outside."""
    edges = {}
    for key, values in grid.items():
        if len(values) > 1 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            if point[key] == min(values):
                edges[key] = "smallest"
            elif point[key] == max(values):
                edges[key] = "largest"
    return edges
