"""Tables with intervals, figures, one self-contained page, Markdown, CSV and JSON, from run folders alone.

python -m sweeps.report study=quickstart
python -m sweeps.report runs=[DIR1,DIR2] tuned=[optimizer.lr] reference=transformer

Keys:  study=NAME or runs=[FOLDER,...]          what to report on
       metric=test/bits_per_byte                 what ranks (test/loss, ...)
       reference=MIXER                           whom the others are compared with
       tuned=[KEY,...]                           keys that may differ beside those that the study tuned
       output=FOLDER                             instead of <paths.results>/<study>
       yardstick=true                            train the 5-gram (seconds, then cached)
       paths.results=results paths.cache=.cache
Flags: --json   print report.json instead of the table

Exit code: 0 done, 1 the runs may not stand in one table, 2 the question makes no sense.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runs.validate import unknown_key
from sweeps.cli import UsageError, as_list, parse
from sweeps.reports.bar import FILE as YARDSTICK
from sweeps.reports.bar import read_kept
from sweeps.reports.collect import CollectError, Run, collect, read_any, settled
from sweeps.reports.export import report_json, write_compact, write_json
from sweeps.reports.gate import NotComparable
from sweeps.reports.markdown import as_csv, evaluations_csv, markdown
from sweeps.reports.table import Board, build
from sweeps.reports.tuning import StudyRecord, read_study

KEYS = ("study", "runs", "metric", "reference", "tuned", "output", "yardstick", "paths.results", "paths.cache")
AD_HOC = "ad_hoc"
EVALUATIONS = "evaluations.csv"


def make(
    *,
    study: str | None = None,
    runs: Sequence[str] = (),
    metric: str | None = None,
    reference: str | None = None,
    tuned: Sequence[str] = (),
    output: Path | None = None,
    yardstick: bool = True,
    results: Path = Path("results"),
    cache: Path = Path(".cache"),
    command: Sequence[str] = (),
) -> tuple[Board, dict[str, Any], Path]:
    """Make a report. Returns the leaderboard, the content of report.json and the folder that everything is in.

    ``command`` are the arguments of the command line that asked for it, if one did.

    Raises CollectError, NotComparable or ValueError, each with a message for the user.
    """
    record: StudyRecord | None = None
    if runs:
        name, found, full = AD_HOC, _distinct([read_any(Path(run)) for run in runs]), False
    else:
        assert study is not None
        name = study
        record = read_study(results, study)
        found, full = collect(results, study)
        if record is not None:
            members = record.members()
            found = [run for run in found if run.name in members]
    settings = _settings(record)
    folder = output or results / name
    question: dict[str, Any] = {
        "name": name,
        "study": record,
        "metric": metric or settings.get("metric") or usual_metric(found),
        "reference": reference,
        "tuned": tuned,
        "cache": cache if yardstick else None,
        "kept": None if full else read_kept(results / name),
    }
    board = build(found, **question)
    if full or runs:
        inside = {run.name for run in board.runs}
        board = build([settled(run, bulk=run.name in inside) for run in found], **question)
    content = report_json(board, public(command, found) if command else "")
    _write(board, content, folder)
    if full and output is None:
        write_compact(board, results, record.content if record else None)
    return board, content, folder


def _settings(record: StudyRecord | None) -> dict[str, Any]:
    """What a study's file says under ``report``."""
    settings = (record.spec.get("report") or {}) if record else {}
    for key in settings:
        if key not in ("metric", "control"):  # the control is for `sweeps.claims`
            raise CollectError(unknown_key(f"report.{key}", ["metric", "control"], "the study's file"))
    return settings


def usual_metric(runs: Sequence[Run]) -> str:
    """Bits per byte of text; of a task its accuracy, of regression the error above the best possible."""
    known = (
        set.intersection(*(set(run.metrics) for run in runs if run.done)) if any(run.done for run in runs) else set()
    )
    if "test/bits_per_byte" in known or "test/accuracy" not in known:
        return "test/excess" if "test/excess" in known and "test/accuracy" not in known else "test/bits_per_byte"
    return "test/accuracy"


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """A folder that was named twice counts once."""
    return list({run.name: run for run in runs}.values())


def _write(board: Board, content: dict[str, Any], folder: Path) -> None:
    from sweeps.reports.page import NAMES, page  # matplotlib is slow to import
    from sweeps.reports.plots import pictures

    folder.mkdir(parents=True, exist_ok=True)
    figures = pictures(board)
    for name in NAMES - {figure.name for figure in figures}:  # an earlier report may have had them
        (folder / f"{name}.png").unlink(missing_ok=True)
        (folder / f"{name}.svg").unlink(missing_ok=True)
    for figure in figures:
        (folder / f"{figure.name}.png").write_bytes(figure.png)
        (folder / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")
    (folder / "report.html").write_text(page(board, content, figures), encoding="utf-8")
    (folder / "report.md").write_text(markdown(board, content["command"]), encoding="utf-8")
    (folder / "report.csv").write_text(as_csv(board, content), encoding="utf-8")
    evaluated = evaluations_csv(content)
    if evaluated is None:
        (folder / EVALUATIONS).unlink(missing_ok=True)
    else:
        (folder / EVALUATIONS).write_text(evaluated, encoding="utf-8")
    write_json(folder / "report.json", content)
    if board.bar is not None:
        write_json(folder / YARDSTICK, board.bar.kept, indent=None)


def public(arguments: Sequence[str], board_runs: Sequence[Run]) -> str:
    """The command line as it stands in the report: without folders of this machine, so that it is the same in any
    clone. Runs are named by where a clone would have them."""
    words = [word for word in arguments if not word.startswith(("paths.", "output=", "runs=", "-"))]
    if any(word.startswith("runs=") for word in arguments):
        places = [f"results/runs/{run.record.get('study', 'default')}/{run.name}" for run in board_runs]
        words = [f"runs=[{','.join(places)}]", *words]
    return shlex.join(["python", "-m", "sweeps.report", *words])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(f"{__doc__}")
        return 0
    try:
        given = parse(arguments, keys=KEYS, flags=("--json",))
        values = given.values
        runs = as_list(values.get("runs"))
        if bool(runs) == ("study" in values):
            raise UsageError("say what to report on: study=NAME or runs=[FOLDER,...], one of the two")
        board, content, folder = make(
            study=None if runs else str(values["study"]),
            runs=runs,
            metric=values.get("metric"),
            reference=values.get("reference"),
            tuned=as_list(values.get("tuned")),
            output=Path(str(values["output"])) if "output" in values else None,
            yardstick=bool(values.get("yardstick", True)),
            results=Path(str(values.get("paths.results", "results"))),
            cache=Path(str(values.get("paths.cache", ".cache"))),
            command=arguments,
        )
    except NotComparable as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (UsageError, CollectError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if "--json" in given.flags:
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return 0
    from sweeps.reports.terminal import show

    show(board, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
