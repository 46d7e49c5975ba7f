"""Tables with intervals, figures, one self-contained page and JSON, from run folders alone.

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
from sweeps.reports.collect import CollectError, Run, collect, read_any
from sweeps.reports.export import report_json, write_compact, write_json
from sweeps.reports.gate import NotComparable
from sweeps.reports.table import Board, build
from sweeps.reports.tuning import StudyRecord, read_study

KEYS = ("study", "runs", "metric", "reference", "tuned", "output", "yardstick", "paths.results", "paths.cache")
AD_HOC = "ad_hoc"


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
    command: str = "",
) -> tuple[Board, dict[str, Any], Path]:
    """Make a report. Returns the leaderboard, the content of report.json and the folder that everything is in.

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
    board = build(
        found,
        name=name,
        study=record,
        metric=metric or settings.get("metric", "test/bits_per_byte"),
        reference=reference,
        tuned=tuned,
        cache=cache if yardstick else None,
    )
    folder = output or results / name
    content = report_json(board, command)
    if board.bar is None and yardstick:
        _keep_yardstick(folder, content)
    _write(board, content, folder)
    if full and output is None:
        write_compact(board, results, record.content if record else None)
    return board, content, folder


def _settings(record: StudyRecord | None) -> dict[str, Any]:
    """What a study's file says under ``report``."""
    settings = (record.spec.get("report") or {}) if record else {}
    for key in settings:
        if key != "metric":
            raise CollectError(unknown_key(f"report.{key}", ["metric"], "the study's file"))
    return settings


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """A folder that was named twice counts once."""
    return list({run.name: run for run in runs}.values())


def _keep_yardstick(folder: Path, content: dict[str, Any]) -> None:
    """The earlier report's, where the corpus is not at hand (a fresh clone) and the data are the same."""
    try:
        before = json.loads((folder / "report.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return
    same = before.get("proof", {}).get("data_fingerprint") == content["proof"]["data_fingerprint"]
    if same and before.get("metric") == content["metric"]:
        content["yardstick"] = before.get("yardstick")


def _write(board: Board, content: dict[str, Any], folder: Path) -> None:
    from sweeps.reports.page import page  # matplotlib is slow to import
    from sweeps.reports.plots import pictures

    folder.mkdir(parents=True, exist_ok=True)
    figures = pictures(board)
    for figure in figures:
        (folder / f"{figure.name}.png").write_bytes(figure.png)
    (folder / "report.html").write_text(page(board, content, figures), encoding="utf-8")
    write_json(folder / "report.json", content)


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
            command=shlex.join(["python", "-m", "sweeps.report", *arguments]),
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
