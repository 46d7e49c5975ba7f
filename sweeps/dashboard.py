"""The report's panels as a Weights & Biases workspace.

python -m sweeps.dashboard study=quickstart entity=team
python -m sweeps.dashboard study=quickstart entity=team --push

Keys:  study=NAME                             the group whose runs are shown
       project=isomix entity=TEAM             where the runs are (needed to push)
       metric=test/bits_per_byte              what ranks; by default as in the report
       output=FILE                            instead of <paths.results>/<study>/dashboard.json
       paths.results=results
Flags: --push    send it; needs WANDB_API_KEY or `wandb login`, and the network

Without --push it only writes the workspace's specification, as W&B stores it. Needs wandb-workspaces:
pip install -c constraints.txt -e '.[dashboard]'. Exit code: 0 done, 1 W&B refused, 2 the question makes no sense.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runs.folder import write_atomic
from sweeps.cli import UsageError, parse
from sweeps.report import usual_metric
from sweeps.reports.collect import CollectError, Run, collect
from sweeps.reports.diagnostics import TITLES
from sweeps.reports.style import looks
from sweeps.reports.tuning import lower_is_better

KEYS = ("study", "project", "entity", "metric", "output", "paths.results")
PLACEHOLDER = "your-entity"
"""Stands in a specification that names no entity: it can be read, not pushed."""

MIXER = "mixer_name"  # in each run's config


def workspace(runs: Sequence[Run], *, study: str, metric: str, project: str, entity: str | None) -> Any:
    """The workspace (wandb_workspaces.workspaces.Workspace) of a study. Nothing is sent.

    Sections follow the report: what ranks, curves against tokens, FLOPs and seconds, quality against state and
    parameters, tables of slices and positions, the passes of two-pass models, memory and solver. Panels without runs that
    could fill them are left out.
    """
    _quiet()
    import wandb_workspaces.expr as expr
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    group = wr.Config(MIXER)
    validation = metric.replace("test/", "val/", 1)
    word = "lower is better" if lower_is_better(metric) else "higher is better"
    mixers = list(dict.fromkeys(run.mixer for run in runs))

    def line(title: str, x: str, y: list[Any], **more: Any) -> Any:
        return wr.LinePlot(
            title=title, x=x, y=y, groupby=group, groupby_aggfunc="mean", groupby_rangefunc="minmax", **more
        )

    sections = [
        ws.Section(
            name="Leaderboard",
            is_open=True,
            panels=[
                wr.BarPlot(
                    title=f"{metric}, {word}", metrics=[wr.SummaryMetric(metric)], groupby=group,
                    groupby_aggfunc="mean", groupby_rangefunc="stderr", orientation="h",
                ),
                wr.MarkdownPanel(markdown=_note(study)),
            ],
        ),
        ws.Section(
            name="How they learn",
            is_open=True,
            panels=[
                line(f"{validation} against tokens", "tokens", [validation]),
                line(f"{validation} against training FLOPs", "train_flops", [validation], log_x=True),
                line(f"{validation} against seconds", "seconds", [validation], log_x=True),
                line(_training_loss(runs), "tokens", ["train/loss"]),
            ],
        ),
        ws.Section(
            name="What they keep, and how large they are",
            is_open=True,
            panels=[
                wr.ScatterPlot(
                    title=f"quality against {name}", x=wr.SummaryMetric(f"counts/{count}"), y=wr.SummaryMetric(metric),
                    log_x=name == "state",
                )
                for name, count in (("state", "state_bytes"), ("parameters", "params_non_embedding"), ("training FLOPs", "train_flops"))
            ],
        ),
        *_tables(ws, wr, runs),
        *_passes(ws, line, runs, validation),
        *_inside(ws, line, runs),
        ws.Section(
            name="Health",
            panels=[
                line("gradient norm", "tokens", ["train/grad_norm"], log_y=True),
                line("loss spikes", "tokens", ["train/spikes"]),
                line("tokens per second", "tokens", ["tokens_per_s"]),
                wr.RunComparer(diff_only="split"),
            ],
        ),
    ]  # fmt: skip
    colours: dict[object, object] = {label: look.light for label, look in looks(mixers).items()}
    return ws.Workspace(
        entity=entity or PLACEHOLDER,
        project=project,
        name=f"isomix: {study}",
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="tokens", smoothing_type="none", max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=[expr.Metric("Group") == study, expr.Metric("JobType") == "train"],
            groupby=[expr.Config(MIXER)],
            order=[expr.Ordering(expr.Summary(metric), ascending=lower_is_better(metric))],
            group_colors=colours,
            pinned_columns=[f"summary:{metric}", f"config:{MIXER}", "summary:counts/params_non_embedding"],
        ),
    )


def _quiet() -> None:
    """wandb-workspaces prints a line on its version when it is imported."""
    os.environ.setdefault("WANDB_SILENT", "true")


def _note(study: str) -> str:
    return (
        f"**{study}**. Bars and bands are means over seeds. Intervals, paired differences, verdicts and the proof that nothing "
        f"but the mixer differed are in the report: `python -m sweeps.report study={study}`."
    )


def _tables(ws: Any, wr: Any, runs: Sequence[Run]) -> list[Any]:
    """Of slices and positions, where runs have them."""
    names = []
    if any("=" in key for run in runs for key in run.metrics):
        names.append("tables/slices")
    if any(run.positions for run in runs):
        names.append("tables/positions")
    panels = [wr.WeavePanelSummaryTable(table_name=name) for name in names]
    return [ws.Section(name="Slices and positions", panels=panels)] if panels else []


def _logged(runs: Sequence[Run], start: str) -> list[str]:
    """What some run has logged under names that begin so."""
    return sorted({key for run in runs for row in run.rows for key in row if key.startswith(start)}, key=_by_place)


def _by_place(key: str) -> tuple[str, int]:
    """``val/drift/8-15`` after ``val/drift/0-7``."""
    name, _, place = key.rpartition("/")
    first = place.partition("-")[0]
    return (name, int(first)) if first.isdigit() else (key, 0)


def _training_loss(runs: Sequence[Run]) -> str:
    """A two-pass model is trained teacher-forced, so this is not what it is ranked by."""
    return "training loss" + (" (of two-pass models: teacher-forced)" if _logged(runs, "val/teacher_forced/") else "")


def _passes(ws: Any, line: Any, runs: Sequence[Run], validation: str) -> list[Any]:
    """Two-pass models: what teacher forcing shows beside what is deployed, and how far the memories are apart."""
    forced = validation.replace("val/", "val/teacher_forced/", 1)
    wanted = {
        f"{forced}: not deployed": [key for key in _logged(runs, forced) if key == forced],
        "distance of the passes' memories, in training": _logged(runs, "train/distance"),
        "distance of the passes' memories, by position": _logged(runs, "val/distance/"),
        "drift of the recurrence's memory, by position": _logged(runs, "val/drift/"),
    }
    panels = [line(title, "tokens", keys) for title, keys in wanted.items() if keys]
    return [ws.Section(name="Two passes and a recurrence", panels=panels)] if panels else []


def _inside(ws: Any, line: Any, runs: Sequence[Run]) -> list[Any]:
    """Each thing that logger.diagnostics looked at: all layers and heads of a mixer in one panel."""
    keys = _logged(runs, "diagnostics/")
    panels = []
    for what, title in TITLES.items():
        mine = [key for key in keys if key.split("/")[1] == what]
        if mine:
            panels.append(line(title, "tokens", mine))
    return [ws.Section(name="Inside the mixers", panels=panels)] if panels else []


def spec(made: Any) -> dict[str, Any]:
    """The workspace as W&B stores it, without the ids that are drawn anew each time, so that equal studies give equal files."""
    made._internal_runset_id = "isomix"  # else drawn anew each time
    plain = made._to_model().spec.model_dump(by_alias=True, exclude_none=True, mode="json")
    return {"entity": made.entity, "project": made.project, "name": made.name, "spec": _without_ids(plain)}


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(child) for key, child in value.items() if key != "__id__"}
    return [_without_ids(child) for child in value] if isinstance(value, list) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(f"{__doc__}")
        return 0
    try:
        given = parse(arguments, keys=KEYS, flags=("--push",))
        values = given.values
        if "study" not in values:
            raise UsageError("study: no value. Say whose runs to show, as in study=quickstart")
        if "--push" in given.flags and not values.get("entity"):
            raise UsageError("entity: no value. --push needs to know whose workspace it is, as in entity=team")
        study, results = str(values["study"]), Path(str(values.get("paths.results", "results")))
        runs = collect(results, study)[0]
        metric = str(values.get("metric") or usual_metric(runs))
        made = workspace(
            runs, study=study, metric=metric, project=str(values.get("project", "isomix")), entity=values.get("entity")
        )
        path = Path(str(values["output"])) if "output" in values else results / study / "dashboard.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(spec(made), indent=1, sort_keys=True) + "\n")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("wandb_workspaces"):
            raise
        sys.stderr.write("wandb-workspaces is not installed: pip install -c constraints.txt -e '.[dashboard]'\n")
        return 2
    except (UsageError, CollectError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    if "--push" in given.flags:
        try:
            made.save()
        except Exception as error:  # noqa: BLE001 - W&B raises what it likes
            sys.stderr.write(f"W&B: {type(error).__name__}: {error}\n")
            return 1
        sys.stdout.write(f"{made.url}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
