"""Which downstream tasks need a long context: MesaNet's split (arXiv 2506.05233, Appendix), from runs of one study.

    python train.py study=local_global
    python eval.py study=local_global suite=[downstream]
    python -m evals.locality 'runs=results/runs/local_global/*'

A task is **global** if (1) its score rises from the shortest of the small windows to the longest of them, and (2) none of
them does better than full attention; else **local**. The paper decides by the scores as they are; here intervals over the
task's documents, paired, say whether another draw of documents might have decided otherwise.
"""

from __future__ import annotations

import glob
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from yaml import YAMLError

from evals.positions import paired
from runs.folder import write_atomic
from runs.validate import ConfigError, typed

log = logging.getLogger(__name__)

SCORES = ("acc", "contains", "exact_match", "f1", "acc_norm")
"""Of tasks without options, the first that there is; of tasks with options always the score per token, as in the paper."""

FULL = "full"


@dataclass
class Command:
    """The command line."""

    runs: Any = "???"  # run folders, or patterns of them
    small: list[int] = field(default_factory=lambda: [4, 16, 64])
    out: str | None = None  # a JSON file

    def check(self, path: str) -> None:
        if len(set(self.small)) < 2 or min(self.small) < 1:
            raise ValueError(f"small={self.small}: at least two different windows, in tokens")


@dataclass(frozen=True)
class Verdict:
    """One task. Differences have ``mean``, ``low`` and ``high`` over its documents, and their number ``n``."""

    task: str
    metric: str
    scores: dict[str, float]  # window, or `full` -> score
    rise: dict[str, Any]  # longest small window minus shortest
    beats: dict[str, dict[str, Any]]  # small window -> it minus full attention
    verdict: str  # global | local
    settled: bool  # whether the intervals allow no other verdict


def judge(task: str, metric: str, documents: Mapping[str, Sequence[float]], small: Sequence[int]) -> Verdict:
    """The paper's rule on each document's score by window (``full`` among them)."""
    windows = [f"{window}" for window in sorted(small)]
    scores = {window: float(np.mean(values)) for window, values in documents.items()}
    rise = paired(documents[windows[-1]], documents[windows[0]])
    beats = {window: paired(documents[window], documents[FULL]) for window in windows}
    is_global = rise["mean"] > 0 and all(gap["mean"] <= 0 for gap in beats.values())
    if any(gap["low"] is None for gap in (rise, *beats.values())) or max(scores.values()) == 0:
        settled = False  # one document; or nobody solves anything, and windows cannot show
    elif is_global:
        settled = rise["low"] > 0 and all(gap["high"] <= 0 for gap in beats.values())
    else:
        settled = rise["high"] <= 0 or any(gap["low"] > 0 for gap in beats.values())
    return Verdict(task, metric, scores, rise, beats, "global" if is_global else "local", settled)


def window_of(folder: Path) -> str:
    """``full`` for full attention, or the window. Raises ConfigError for another mixer."""
    try:
        mixer = OmegaConf.load(folder / "config.yaml").mixer
    except OSError:
        raise ConfigError(f"runs={folder}: must be a run's folder, and it has no config.yaml") from None
    if mixer.kind == "transformer":
        return FULL
    if mixer.kind == "swa":
        return f"{mixer.window}"
    raise ConfigError(f"runs={folder}: its mixer is {mixer.kind}; the split is made with transformer and swa")


def results_of(folders: Sequence[Path]) -> dict[Path, list[dict[str, Any]]]:
    """Folder -> its downstream results that all folders have: of equal settings and step, the name of a file says."""
    names = [{path.name for path in (folder / "eval").glob("downstream-*.json")} for folder in folders]
    for folder, found in zip(folders, names, strict=True):
        if not found:
            raise ConfigError(
                f"runs={folder}: has no downstream results; python eval.py run={folder} suite=[downstream]"
            )
    common = sorted(set.intersection(*names))
    if not common:
        raise ConfigError(
            "runs: no downstream results of the same settings and step in all of them; evaluate them in one command, "
            "python eval.py study=<name> suite=[downstream]"
        )
    return {folder: [json.loads((folder / "eval" / name).read_text()) for name in common] for folder in folders}


def documents_of(result: Mapping[str, Any], task: str) -> tuple[str, list[float]] | None:
    """(metric, each document's score, the mean over draws of examples); None where the task has none."""
    draws = [draw.get("documents", {}) for draw in result["tables"][task]]
    per_token = [name for name in draws[0] if name.endswith("_per_token")]
    found = next((name for name in (*per_token, *SCORES) if name in draws[0]), None)
    return None if found is None else (found, np.mean([draw[found] for draw in draws], axis=0).tolist())


def split(folders: Sequence[Path], small: Sequence[int]) -> tuple[list[Verdict], list[str]]:
    """A verdict for each task that all runs have, and tasks that have no score by document. Seeds of one window are
    averaged document by document."""
    results = results_of(folders)
    windows = {folder: window_of(folder) for folder in folders}
    for wanted in (*map(str, small), FULL):
        if wanted not in windows.values():
            have = ", ".join(sorted(set(windows.values()), key=lambda w: (w == FULL, w.zfill(9))))
            raise ConfigError(f"small={list(small)}: there is no run with window {wanted}; runs has {have}")
    scores: dict[str, tuple[str, dict[str, list[list[float]]]]] = {}
    without: list[str] = []
    for folder, contents in results.items():
        tasks = [(content, task) for content in contents for task in content["tables"]]
        for content, task in tasks:
            if [name for _, name in tasks].count(task) > 1:
                raise ConfigError(f"runs={folder}: {task} is in several downstream results; remove those not meant")
            found = documents_of(content, task)
            if found is None:
                without.append(task)
                continue
            _, by_window = scores.setdefault(task, (found[0], {}))
            by_window.setdefault(windows[folder], []).append(found[1])
    verdicts = []
    order = sorted(set(windows.values()), key=lambda w: (w == FULL, w.zfill(9)))
    for task, (metric, by_window) in scores.items():
        means = {window: np.mean(by_window[window], axis=0).tolist() for window in order}
        verdicts.append(judge(task, metric, means, small))
    return verdicts, sorted(set(without))


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """As it is printed."""
    shown = Table(title="score by window of attention, differences with 95 % intervals over documents")
    windows = list(verdicts[0].scores)
    small = list(verdicts[0].beats)
    columns = [*windows, f"{small[-1]} minus {small[0]}", "best small minus full", "n"]
    shown.add_column("task", no_wrap=True)
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    for one in verdicts:
        best = max(one.beats.values(), key=lambda gap: gap["mean"])
        shown.add_row(
            f"{one.task}\n[dim]{one.metric}[/]",
            *(f"{one.scores[window]:.3f}" for window in windows),
            _gap(one.rise),
            _gap(best),
            str(one.rise["n"]),
            f"{one.verdict}" if one.settled else f"{one.verdict}\n[dim]not settled[/]",
        )
    return shown


def _gap(gap: dict[str, Any]) -> str:
    if gap["low"] is None:
        return f"{gap['mean']:+.3f}"
    return f"{gap['mean']:+.3f}\n[dim]{gap['low']:+.3f} to {gap['high']:+.3f}[/]"


def _folders(pattern: str) -> list[Path]:
    """Those that match; the pattern itself where none does. A study's folder also holds files of its own."""
    return [path for name in sorted(glob.glob(pattern)) if (path := Path(name)).is_dir()] or [Path(pattern)]


def _parsed(arguments: Sequence[str]) -> Command:
    for word in arguments:
        if "=" not in word:
            raise ConfigError(f"{word}: not key=value. Keys: runs, small, out")
    try:
        given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{' '.join(arguments)}: {str(error).splitlines()[0]}") from None
    return typed(Command, given, "", "python -m evals.locality")


def main(arguments: Sequence[str]) -> int:
    """The command line; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        command = _parsed(arguments)
        given = command.runs if isinstance(command.runs, list) else [command.runs]
        folders = [folder for pattern in given for folder in _folders(str(pattern))]
        verdicts, without = split(folders, command.small)
        if not verdicts:
            raise ConfigError(f"runs: no task with a score for each document among {', '.join(without)}")
    except (ConfigError, ValueError) as error:
        log.error("%s", error)
        return 2
    console = Console()
    console.width = max(console.width, 84 + 8 * len(verdicts[0].scores))  # a table that is cut says nothing
    console.print(table_of(verdicts))
    for name in ("global", "local"):
        console.print(f"{name}: {', '.join(one.task for one in verdicts if one.verdict == name) or 'none'}")
    if without:
        console.print(f"no score by document, left out: {', '.join(without)}")
    if command.out is not None:
        content = {"small": command.small, "runs": [str(f) for f in folders], "tasks": [asdict(v) for v in verdicts]}
        write_atomic(Path(command.out), json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
