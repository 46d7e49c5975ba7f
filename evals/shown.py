"""Results of evaluation suites as figures show them: read from their JSON files, each run called by its mixer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evals.drawing import DEPLOYED, OTHER_MODE, SIZES, Look, looks
from runs.folder import read_json

NATS = "nats per token"


@dataclass(frozen=True)
class Shown:
    """One result and how it is drawn."""

    label: str
    look: Look
    content: dict[str, Any]  # of the JSON file
    comparison: str | None = None  # key of the run, where its folder is there
    data: str | None = None  # fingerprint of what it has read

    @property
    def metrics(self) -> dict[str, float | None]:
        return self.content["metrics"]

    @property
    def tables(self) -> dict[str, Any]:
        return self.content["tables"]

    def reason(self) -> str | None:
        """Why it has nothing to show, or not all of it."""
        reasons = "; ".join(sorted(set(self.content["reasons"].values())))
        if not reasons:
            return None
        partly = any(value is not None for value in self.metrics.values())
        return f"{self.label}: {'in part ' if partly else ''}n/a, {reasons}"


Draw = Callable[[Sequence[Shown]], dict[str, Figure]]
"""Results of one suite -> the name of each figure after the file's own ("" for the only one), and the figure."""


def load(paths: Sequence[Path]) -> dict[str, list[Shown]]:
    """Suite -> its results. Raises ValueError where the results of one suite were not made with the same settings."""
    found: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for path in paths:
        content = json.loads(Path(path).read_text())
        if not isinstance(content, dict) or not {"suite", "settings", "metrics", "tables"} <= set(content):
            raise ValueError(f"{path}: must be a result of eval.py, <run>/eval/<suite>-<hash>.json")
        found.setdefault(content["suite"], []).append((Path(path), content))
    shown: dict[str, list[Shown]] = {}
    for suite, pairs in found.items():
        first_path, first = pairs[0]
        for path, content in pairs[1:]:
            for key, value in content["settings"].items():
                if key != "reference" and value != first["settings"].get(key):
                    raise ValueError(
                        f"suite.{suite}.{key}={value} in {path}, and {first['settings'].get(key)} in {first_path}: one figure "
                        "shows results of equal settings"
                    )
        names = labels([content for _, content in pairs])
        style = looks(names)
        shown[suite] = []
        for name, (path, content) in zip(names, pairs, strict=True):
            run = read_json(path.parents[1] / "run.json") if len(path.parents) > 1 else {}
            data = (run.get("data") or {}).get("fingerprint")
            shown[suite].append(Shown(name, style[name], content, run.get("comparison_key"), data))
    return shown


def mixer_of(run: str) -> str:
    """The mixer's name, or a variant's, in that of a run's folder."""
    return re.sub(r"-[0-9a-f]{10}$", "", run)


def labels(contents: Sequence[dict[str, Any]]) -> list[str]:
    """The mixer of each result; where that does not tell them apart also the step, or the run. Raises ValueError where one
    result is there twice."""
    mixers = [mixer_of(content["run"]) for content in contents]
    steps = [f"{mixer}, step {content['step']}" for mixer, content in zip(mixers, contents, strict=True)]
    both = [f"{content['run']}, step {content['step']}" for content in contents]
    names = []
    for i, mixer in enumerate(mixers):
        same = [k for k, other in enumerate(mixers) if other == mixer]
        one_run = len({contents[k]["run"] for k in same}) == 1
        one_step = len({contents[k]["step"] for k in same}) == 1
        names.append(mixer if len(same) == 1 else steps[i] if one_run else contents[i]["run"] if one_step else both[i])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: the same run at the same step is there twice")
    return names


def curve(axes: Axes, one: Shown, x: Sequence[float], y: Sequence[Any], mode: str | None = None, **more: Any) -> None:
    """A line with its marker, gaps where there is no value; dashed in a ``mode`` that is not deployed."""
    name = one.label if mode is None else f"{one.label}, {mode.replace('_', '-')}"
    style: dict[str, Any] = {
        "color": one.look.colour,
        "marker": one.look.marker,
        "markeredgecolor": "none",
        "label": name,
    }
    style |= {"markersize": 5 * SIZES.get(one.look.marker, 1), "dashes": DEPLOYED if mode is None else OTHER_MODE}
    axes.plot(x, [float("nan") if value is None else value for value in y], **(style | more))


def middles(edges: Sequence[int]) -> list[float]:
    """Tokens read before the targets of each range, geometric middle: the target of position t comes after t + 1."""
    return [((a + 1) * b) ** 0.5 for a, b in zip(edges, edges[1:], strict=False)]
