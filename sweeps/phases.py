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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from runs.folder import write_atomic
from runs.run import STOPPED
from runs.validate import ConfigError
from sweeps import slurm
from sweeps.jobs import Job, Locator, Run, Selection, as_overrides, seed_jobs, states, tune_jobs
from sweeps.study import PHASES, Point, Study, Trial, at_edge, choose

log = logging.getLogger(__name__)

Launch = Callable[[list[list[str]], int], Sequence[JobReturn]]
"""A launcher's ``launch``: the overrides of each job, and the number of the first."""

COMMAND = "command.json"
LIVE = ("running", "queued")

HOPELESS = ("NotFinite", "ConfigError")
"""Errors that come again when nothing is changed: such runs are not tried again until a person repeats the command."""


@dataclass(frozen=True)
class Following:
    """How a study goes on when its launcher submits and returns: a job repeats the command after the others.

    ``submit`` takes the jobs to wait for, the phase they belong to and how often that phase has been tried again. ``after``
    and ``tries`` are what the command that is running was started with; None for one that a person typed.
    """

    submit: Callable[[list[str], str, int], str] | None
    retries: int = 0
    after: str | None = None
    tries: int = 0

    def tries_of(self, phase: str) -> int:
        """How often this phase has been tried again by itself."""
        return self.tries if phase == self.after else 0


def conduct(
    study: Study,
    selection: Selection,
    locate: Locator,
    launch: Launch,
    results: Path,
    *,
    dry: bool = False,
    following: Following | None = None,
    command: Sequence[str] = (),
) -> None:
    """Run what is selected and not done. Exits with code 1 if it is not all done in the end, 75 if a signal stopped it.

    ``following`` belongs to launchers that submit and return: then what is queued or running in the end is no failure.
    Raises ConfigError before anything starts if any job is wrong, and what the launcher raises if it started nothing.
    """
    phases = Phases(study, selection, locate, launch, dry, following)
    chosen = {mixer: study.points(mixer)[0] for mixer in study.mixers if not study.is_tuned(mixer)}
    tuning = phases.located(tune_jobs(study))
    early = phases.located(seed_jobs(study, chosen))  # an error in there should not wait for the end of the first phase
    path = results / "runs" / study.name / "study.json"
    if not dry:
        remember(path.with_name(COMMAND), command)
        if not path.exists():  # so that `sweeps.status` knows what is to come from the first moment on
            write_record(path, study, selection, chosen, phases.tables(tuning), early)
    if tuning:
        phases.run("tune", tuning)
    tables = phases.tables(tuning)
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
    follows = phases.follow({"tune": tuning, "seeds": final})
    runs = [run for run in [*tuning, *final] if run.job in selection]
    if not summary(study, runs, waiting, phases.reasons, follows, returned=following is not None):
        sys.exit(1)


class Phases:
    """Launches what is missing, and reads the folders before and after."""

    def __init__(
        self,
        study: Study,
        selection: Selection,
        locate: Locator,
        launch: Launch,
        dry: bool,
        following: Following | None = None,
    ):
        self.study, self.selection, self.locate, self.launch, self.dry = study, selection, locate, launch, dry
        self.following = following
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
        """Run the selected runs of a phase that are neither done nor running nor queued."""
        runs = [run for run in everything if run.job in self.selection]
        found = states(runs)
        missing = [run for run, s in zip(runs, found, strict=True) if s not in (*LIVE, "done")]
        todo = list({run.name: run for run in missing}.values())  # two points of a grid may turn out to be one run
        todo = self._worth_trying(name, todo)
        log.info(
            "%s: %d runs, %d done, %s%s%d to launch",
            name,
            len(runs),
            found.count("done"),
            f"{n} running in another process, " if (n := found.count("running")) else "",
            f"{n} queued, " if (n := found.count("queued")) else "",
            len(todo),
        )
        if self.dry:
            for run, state in zip(runs, found, strict=True):
                log.info("  %s  %-9s  %s", run.name, state, " ".join(self.locate.overrides(run.job)))
        elif todo:
            self._launch(todo)

    def _worth_trying(self, phase: str, todo: list[Run]) -> list[Run]:
        """A person who repeats the command wants all of them; a command that repeats itself must come to an end."""
        following = self.following
        if following is None or following.after is None:
            return todo
        passed = PHASES.index(phase) < PHASES.index(following.after)
        if passed or (phase == following.after and following.tries >= following.retries):
            return []
        return [run for run in todo if not any(word in (run.error() or "") for word in HOPELESS)]

    def follow(self, phases: dict[str, list[Run]]) -> str | None:
        """Have the command repeated after the first phase that has queued or running jobs. Returns that job's id."""
        if self.following is None or self.following.submit is None:
            return None
        for phase, everything in phases.items():
            runs = [run for run in everything if run.job in self.selection]
            live = [run for run, state in zip(runs, states(runs), strict=True) if state in LIVE]
            queue = slurm.queue() if live else {}
            jobs = [job for run in live if (job := run.job_note().get("job")) in queue]
            if jobs:
                again = phase == self.following.after
                return self.following.submit(jobs, phase, self.following.tries_of(phase) + again)
        return None

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

    def tables(self, tuning: list[Run]) -> dict[str, list[Trial]]:
        """The trials of each mixer."""
        return {mixer: self.trials([run for run in tuning if run.job.mixer == mixer]) for mixer in self.study.mixers}

    def trials(self, runs: list[Run]) -> list[Trial]:
        """The tune phase of a mixer, as far as it got."""
        out = []
        for run, state in zip(runs, states(runs), strict=True):
            assert self.study.tune is not None
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


def remember(path: Path, command: Sequence[str]) -> None:
    """The overrides of the command and where it was given, for ``sweeps.status --retry``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"overrides": list(command), "cwd": str(Path.cwd())}, indent=1))


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
    found = {run.name: state for run, state in zip(runs, states(runs), strict=True)}
    for mixer, grid in study.mixers.items():
        point = chosen.get(mixer)
        mine = [run for run in runs if run.job.mixer == mixer]
        mixers[mixer] = {
            "point": point,
            "at_edge": at_edge(point, grid) if point else {},
            "trials": [asdict(trial) for trial in tables[mixer]],
            "runs": [{"seed": run.job.seed, "run": run.name, "state": found[run.name]} for run in mine],
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


def summary(
    study: Study,
    runs: list[Run],
    waiting: list[str],
    reasons: dict[str, str],
    follows: str | None,
    *,
    returned: bool = False,
) -> bool:
    """Log what failed, with its error, and the last line with the counts. Is everything done, or on its way?

    ``follows`` is the job that repeats the command, ``returned`` says that the launcher submits and returns.
    """
    by_name = {run.name: run for run in runs}  # a run may be in both phases
    found = dict(zip(by_name, states(list(by_name.values())), strict=True))
    for name, state in found.items():
        why = by_name[name].error() if state == "failed" else reasons.get(name)
        if state != "done" and not (returned and state in LIVE):
            level = logging.ERROR if why else logging.WARNING
            log.log(level, "%s  %s (%s)%s", state, name, by_name[name].job, f": {why}" if why else "")
    counts = Counter(found.values())
    words = [f"{counts['done']} done", *(f"{n} {state}" for state, n in counts.items() if state != "done")]
    if waiting:
        words.append(f"no point chosen for {', '.join(waiting)}")
    level = logging.INFO
    if follows:
        more = f"; job {follows} goes on when they have ended (python -m sweeps.status study={study.name})"
    elif returned and set(counts) & set(LIVE):
        more = "; the same command goes on when they have ended"
    elif not waiting and set(counts) <= {"done"}:
        more = ""
    else:
        level, more = logging.WARNING, "; the same command runs what is missing"
    log.log(level, "study %s: %s%s", study.name, ", ".join(words), more)
    return level == logging.INFO
