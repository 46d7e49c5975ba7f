"""Which runs are evaluated: folders, ``study:<name>`` for the finished runs of a study, and checkpoints of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from evals.suite import Subject
from runs import checkpoints
from runs.folder import read_json
from runs.load import load_model, load_run

STUDY = "study:"


def runs_of_study(results: Path, study: str, mixers: Sequence[str] | None = None) -> tuple[list[Path], list[str]]:
    """Folders of the finished runs that a study reports on (its seeds at the chosen points, no trials), and the names of
    those that are not finished. ``mixers`` keeps only these. Raises ValueError for what does not exist."""
    folder = results / "runs" / study
    content = read_json(folder / "study.json")
    if not content:
        known = sorted(path.parent.name for path in (results / "runs").glob("*/study.json"))
        raise ValueError(
            f"study={study}: no study was run under {results / 'runs'} by this name. Studies there: "
            f"{', '.join(known) or 'none'}"
        )
    found: dict[str, dict[str, Any]] = content["mixers"]
    for mixer in mixers or ():
        if mixer not in found:
            raise ValueError(f"mixers={mixer}: must be one of study {study}: {', '.join(found)}")
    names = {row["run"]: None for mixer in (mixers or found) for row in found[mixer]["runs"]}
    done = [name for name in names if read_json(folder / name / "status.json").get("state") == "done"]
    if not done:
        raise ValueError(
            f"study={study}: none of its {len(names)} runs is finished; python -m sweeps.status tells more"
        )
    return [folder / name for name in done], [name for name in names if name not in done]


def check_folder(key: str, folder: Path) -> None:
    """Raises ValueError, naming the key, where there is no run or no checkpoint of it."""
    if not (folder / "config.yaml").exists():
        raise ValueError(f"{key}={folder}: no run folder (it has no config.yaml)")
    if not any((folder / "checkpoints" / name).exists() for name in (checkpoints.LAST, checkpoints.BEFORE)):
        raise ValueError(f"{key}={folder}: holds no checkpoint yet")


def subjects(folder: Path, device: str | torch.device, steps: str | int = "last", **options: Any) -> Iterator[Subject]:
    """The run at its ``last`` checkpoint, at ``all`` that were kept and the last, in their order, or at one step, where it
    has one there. ``options`` are those of Subject. Raises ConfigError where it is no run folder."""
    trained = load_run(folder)
    kept = {int(path.stem.removeprefix("step_")): path for path in checkpoints.kept(folder)}
    for step in sorted({*kept, trained.step}):
        last = step == trained.step
        if steps == "all" or step == steps or (steps == "last" and last):
            model = trained.model if last else load_model(trained.config, trained.dataset, kept[step])
            yield Subject(folder.name, trained.config, trained.dataset, model.to(device).eval(), step, **options)


def at_step(key: str, folder: Path, like: Subject) -> Subject:
    """Another run at the same step, to be evaluated in the same way as ``like``. Raises ValueError, naming the key,
    where it has no checkpoint there."""
    check_folder(key, folder)
    options = {"batch": like.batch, "recurrent_batch": like.recurrent_batch, "cache": like.cache}
    found = next(subjects(folder, like.device, like.step, **options), None)
    if found is None:
        raise ValueError(f"{key}={folder}: has no checkpoint at step {like.step}, at which {like.name} is evaluated")
    return found
