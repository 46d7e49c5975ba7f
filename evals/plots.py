"""The figures of evaluation results, PNG and SVG, made from their JSON files alone.

    python -m evals.plots results/runs/quickstart/swa-*/eval/positions-*.json
    python -m evals.plots results/runs/quickstart/{swa,mesa}-*/eval/positions-*.json output=results/positions

One file: the figures lie beside it, ``<suite>-<hash>.png``. Several of one suite: their runs in one figure, each called by
its mixer, in ``output``. `eval.py` makes those of each result that it writes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from evals.drawing import legend, notes, save, theme
from evals.plots_inside import DRAW_INSIDE
from evals.plots_text import DRAW_TEXT
from evals.shown import Shown, load

log = logging.getLogger(__name__)

DRAW = DRAW_TEXT | DRAW_INSIDE


def figures(shown: Sequence[Shown]) -> dict[str, Figure]:
    """The figures of results of one suite; {} where it has none, or all results are n/a."""
    draw = DRAW.get(shown[0].content["suite"])
    if draw is None:
        return {}
    with theme():
        made = draw(shown)
        lines = [line for one in shown if (line := one.reason()) is not None]
        if len({one.comparison for one in shown}) > 1:
            lines.append("These runs differ in more than their mixer (python -m sweeps.diff says in what).")
        devices = {one.tables["device"] for one in shown if "device" in one.tables}
        lines += [f"On {', '.join(sorted(devices))}."] if devices else []
        for figure in made.values():
            notes(figure, lines)
            legend(figure)
    return made


def draw(paths: Sequence[Path], folder: Path | None = None) -> list[Path]:
    """Writes the figures of results: each suite's into ``folder``, or beside its only file. Returns the files. Raises
    ValueError as `load` does, and where several results of a suite have no folder."""
    written = []
    shown = load(paths)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for suite, results in shown.items():
        if folder is None and len(results) > 1:
            raise ValueError(f"output: must name a folder, since {len(results)} results of {suite} go into one figure")
        stem = folder / suite if folder is not None else Path(paths[list(shown).index(suite)]).with_suffix("")
        made = figures(results)
        with theme():
            for name, figure in made.items():
                written += save(figure, stem.with_name(f"{stem.name}-{name}" if name else stem.name))
    return written


def main(arguments: Sequence[str]) -> int:
    """The command line; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    output = [word.partition("=")[2] for word in arguments if word.startswith("output=")]
    files = [Path(word) for word in arguments if not word.startswith("output=")]
    try:
        if not files:
            raise ValueError(
                "python -m evals.plots: name results, <run>/eval/<suite>-<hash>.json, and a folder, output=<folder>"
            )
        written = draw(files, Path(output[-1]) if output else None)
    except (ValueError, OSError) as error:
        log.error("%s", error)
        return 2
    for path in written:
        log.info("%s", path)
    if not written:
        log.info("nothing to draw: these suites have no curves, or no result")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
