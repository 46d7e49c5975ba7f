"""Runs a study: tune, choose, then the seeds at the chosen points; what is finished is not run again.

The run folders tell what happened, never the launcher: a launcher may submit and return, its workers may be killed,
and half of the runs may be from last week.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from runs.folder import write_atomic
from runs.run import STOPPED
from runs.validate import ConfigError
from sweeps.jobs import Job, Locator, Run, Selection, as_overrides, seed_jobs, tune_jobs
from sweeps.study import PHASES, Point, Study, Trial, at_edge, choose

log = logging.getLogger(__name__)

Launch = Callable[[list[list[str]], int], Sequence[JobReturn]]
"""A launcher's ``launch``: the overrides of each job, and the number of the first."""


def conduct(
    study: Study, selection: Selection, locate: Locator, launch: Launch, results: Path, *, dry: bool = False
) -> None:
    """Run what is selected and not done. Exits with code 1 if it is not all done in the end, 75 if a signal stopped it.

    Raises ConfigError before anything starts if any job is wrong, and what the launcher raises if it started nothing.
    """
    phases = Phases(study, selection, locate, launch, dry)
    chosen = {mixer: study.points(mixer)[0] for mixer in study.mixers if not study.is_tuned(mixer)}
    tuning = phases.located(tune_jobs(study))
    phases.located(seed_jobs(study, chosen))  # an error in the second phase should not wait for the end of the first
    path = results / "runs" / study.name / "study.json"
    if tuning:
        phases.run("tune", tuning)
    tables = {mixer: phases.trials([run for run in tuning if run.job.mixer == mixer]) for mixer in study.mixers}
    for mixer, trials in tables.items():
        point = phases.choice(mixer, trials) if trials else None
        if point is not None:
            chosen[mixer] = point
    final = phases.located(seed_jobs(study, chosen))
    if not dry:
        write_record(path, study, selection, chosen, tables, final)
    if final:
        phases.run("seeds", final)
    if dry:
        return
    write_record(path, study, selection, chosen, tables, final)
    waiting = [mixer for mixer in selection.mixers if mixer not in chosen]
    runs = [run for run in [*tuning, *final] if run.job in selection]
    if not summary(study, runs, waiting, phases.reasons):
        sys.exit(1)


class Phases:
    """Launches what is missing, and reads the folders before and after."""

    def __init__(self, study: Study, selection: Selection, locate: Locator, launch: Launch, dry: bool):
        self.study, self.selection, self.locate, self.launch, self.dry = study, selection, locate, launch, dry
        self.launched = 0
        self.broken: set[str] = set()
        self.reasons: dict[str, str] = {}  # of runs that never had a folder

    def located(self, jobs: list[Job]) -> list[Run]:
        """Compose and validate all jobs. What is wrong with a mixer that is not selected is no reason to stop."""
        runs = []
        for job in jobs:
            if job.mixer not in self.broken:
                try:
                    runs.append(self.locate(job))
                except ConfigError as error:
                    if job.mixer in self.selection.mixers:
                        raise
                    self.broken.add(job.mixer)
                    log.warning("not selected, and not in order: %s", error)
        return [run for run in runs if run.job.mixer not in self.broken]

    def run(self, name: str, everything: list[Run]) -> None:
        """Run the selected runs of a phase that are neither done nor running."""
        runs = [run for run in everything if run.job in self.selection]
        states = [run.state() for run in runs]
        missing = [run for run, s in zip(runs, states, strict=True) if s not in ("done", "running")]
        todo = list({run.name: run for run in missing}.values())  # two points of a grid may turn out to be one run
        elsewhere = states.count("running")
        log.info(
            "%s: %d runs, %d done, %s%d to launch",
            name,
            len(runs),
            states.count("done"),
            f"{elsewhere} running in another process, " if elsewhere else "",
            len(todo),
        )
        if self.dry:
            for run, state in zip(runs, states, strict=True):
                log.info("  %s  %-9s  %s", run.name, state, " ".join(self.locate.overrides(run.job)))
        elif todo:
            self._launch(todo)

    def _launch(self, todo: list[Run]) -> None:
        before = [run.folder.status() for run in todo]
        returned: Sequence[JobReturn] = ()
        try:
            returned = self.launch([self.locate.overrides(run.job) for run in todo], self.launched)
        except (SystemExit, KeyboardInterrupt) as stop:
            if isinstance(stop, SystemExit) and stop.code != STOPPED:
                raise
            log.warning("study %s is stopped; the same command continues it", self.study.name)
            sys.exit(STOPPED)
        except Exception as error:
            if [run.folder.status() for run in todo] == before:
                raise  # it started nothing: a wrong partition, a missing package
            log.error("launcher: %s: %s", type(error).__name__, error, exc_info=True)
        self.launched += len(todo)
        # Looked at only for runs that ended before they had a folder: nothing else can say why.
        for run, result in zip(todo, returned or (), strict=False):
            if run.state() == "missing" and isinstance(result, JobReturn) and result.status == JobStatus.FAILED:
                self.reasons[run.name] = str(result._return_value)

    def trials(self, runs: list[Run]) -> list[Trial]:
        """The tune phase of a mixer, as far as it got."""
        out = []
        for run in runs:
            assert self.study.tune is not None
            state = run.state()
            value = run.metric(self.study.tune.metric) if state == "done" else None
            out.append(Trial(run.job.point, run.job.seed, run.name, state, value))
        return out

    def choice(self, mixer: str, trials: list[Trial]) -> Point | None:
        """The best point of a mixer whose trials have all ended, failed ones included; None while some have not."""
        assert self.study.tune is not None
        shout = log.warning if mixer in self.selection.mixers else log.debug
        unfinished = [trial for trial in trials if trial.state not in ("done", "failed")]
        if unfinished:
            shout("%s: nothing chosen yet, %d of %d trials have not ended", mixer, len(unfinished), len(trials))
            return None
        point = choose(trials, self.study.tune.seeds, self.study.tune.mode)
        if point is None:
            shout("%s: nothing to choose from, no point finished with all its tune seeds", mixer)
            return None
        edges = at_edge(point, self.study.mixers[mixer])
        beyond = ", ".join(f"{key} is the {edge} tried" for key, edge in edges.items())
        log.info("%s: chosen %s%s", mixer, " ".join(as_overrides(point)), f" (at the edge: {beyond})" if beyond else "")
        return point


def write_record(
    path: Path,
    study: Study,
    selection: Selection,
    chosen: dict[str, Point],
    tables: dict[str, list[Trial]],
    runs: list[Run],
) -> None:
    """``study.json``: the study, and for each mixer its point, trials and runs with their states.

    Always of the whole study, read from the folders: narrowed commands side by side cannot contradict each other.
    """
    mixers: dict[str, dict[str, Any]] = {}
    for mixer, grid in study.mixers.items():
        point = chosen.get(mixer)
        mine = [run for run in runs if run.job.mixer == mixer]
        mixers[mixer] = {
            "point": point,
            "at_edge": at_edge(point, grid) if point else {},
            "trials": [asdict(trial) for trial in tables[mixer]],
            "runs": [{"seed": run.job.seed, "run": run.name, "state": run.state()} for run in mine],
        }
    phases = {
        phase: dict(Counter(row["state"] for entry in mixers.values() for row in entry[key]))
        for phase, key in zip(PHASES, ("trials", "runs"), strict=True)
    }
    content = {
        "study": study.name,
        "spec": study.plain(),
        "overrides": selection.common,
        "phases": phases,
        "mixers": mixers,
        "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(content, indent=1))


def summary(study: Study, runs: list[Run], waiting: list[str], reasons: dict[str, str]) -> bool:
    """Log what failed, with its error, and the last line with the counts. Is everything done?"""
    by_name = {run.name: run for run in runs}  # a run may be in both phases
    states = {name: run.state() for name, run in by_name.items()}
    for name, state in states.items():
        why = by_name[name].error() if state == "failed" else reasons.get(name)
        if state != "done":
            level = logging.ERROR if why else logging.WARNING
            log.log(level, "%s  %s (%s)%s", state, name, by_name[name].job, f": {why}" if why else "")
    counts = Counter(states.values())
    words = [f"{counts['done']} done", *(f"{n} {state}" for state, n in counts.items() if state != "done")]
    if waiting:
        words.append(f"no point chosen for {', '.join(waiting)}")
    complete = not waiting and set(counts) <= {"done"}
    level, more = (logging.INFO, "") if complete else (logging.WARNING, "; the same command runs what is missing")
    log.log(level, "study %s: %s%s", study.name, ", ".join(words), more)
    return complete
