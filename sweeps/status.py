"""How far a study is: done, running, queued, failed with its error, missing. From run folders and squeue; no sacct.

python -m sweeps.status study=recall
python -m sweeps.status study=recall --retry

Keys:  study=NAME                   which study
       paths.results=results        where its runs are
Flags: --json     the same as JSON
       --retry    then run the study's own command again: what is done or queued stays, failed and lost runs go on

Exit code: 0 all done or on its way, 1 something failed, was lost or stopped, 2 the question makes no sense.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs.folder import RunFolder, read_json
from runs.identity import ROOT
from runs.validate import ConfigError
from sweeps.cli import UsageError, parse
from sweeps.jobs import Job, Run, as_overrides, states
from sweeps.phases import COMMAND, LIVE

ORDER = ("done", "running", "queued", "failed", "lost", "preempted", "missing")


@dataclass(frozen=True)
class Row:
    """One run of a study. ``seconds_left`` is an estimate from its own pace; None before it has one."""

    phase: str
    run: str
    what: str  # its overrides
    state: str
    step: int | None = None
    steps: int | None = None
    seconds_left: float | None = None
    job: str | None = None
    error: str | None = None

    def line(self) -> str:
        """For a terminal."""
        words = [f"  {self.state:<9}  {self.run}  {self.what}"]
        if self.state in LIVE and self.step is not None:
            words.append(f"step {self.step} of {self.steps}")
        if self.seconds_left is not None:
            words.append(f"{_duration(self.seconds_left)} left")
        if self.state in LIVE and self.job:
            words.append(f"job {self.job}")
        return ", ".join(words) + (f": {self.error}" if self.error else "")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min"
        if minutes
        else f"{seconds:.0f} s"
    )


def look(results: Path, study: str) -> tuple[list[Row], list[str]]:
    """All runs of a study that are known so far, and the mixers that wait for their choice. Raises UsageError."""
    folder = results / "runs" / study
    record = read_json(folder / "study.json")
    if not record:
        known = sorted(path.parent.name for path in (results / "runs").glob("*/study.json"))
        hint = f" Studies there: {', '.join(known)}." if known else ""
        raise UsageError(
            f"study={study}: never started, there is no {folder / 'study.json'}.{hint} To start it: python train.py study={study}"
        )
    runs: dict[str, Run] = {}  # a run may be in both phases, and two points may be one run
    for mixer, entry in record["mixers"].items():
        jobs = [("tune", row["point"], row) for row in entry["trials"]]
        jobs += [("seeds", entry["point"], row) for row in entry["runs"]]
        for phase, point, row in jobs:
            job = Job(phase, mixer, point, row["seed"])
            runs.setdefault(row["run"], Run(job, RunFolder((folder / row["run"]).absolute())))
    found = [_row(run, state) for run, state in zip(runs.values(), states(list(runs.values())), strict=True)]
    return found, [mixer for mixer, entry in record["mixers"].items() if entry["point"] is None]


def _row(run: Run, state: str) -> Row:
    status, note = run.folder.status(), run.job_note()
    step, left = status.get("step"), None
    if state == "running":
        clocked = [row for row in run.folder.rows() if "seconds" in row]
        if clocked:
            step = clocked[-1]["step"]
            left = (status["steps"] - step) * clocked[-1]["seconds"] / step
    error = run.error() if state == "failed" else None
    if state in ("lost", "missing", "preempted") and note:
        error = _last_line(Path(note["log"]))  # whatever ended the job said it there, if anywhere
    what = " ".join([*as_overrides(run.job.point), f"seed={run.job.seed}"])
    steps, job = status.get("steps"), note.get("job")
    error = error.splitlines()[-1] if error else None
    return Row(run.job.phase, run.name, what, state, step, steps, left, job, error)


def _last_line(log: Path) -> str | None:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return None
    return lines[-1] if lines else None


def text(study: str, rows: Sequence[Row], waiting: Sequence[str]) -> str:
    """What is not done line by line, then the counts."""
    lines = []
    for phase in ("tune", "seeds"):
        mine = [row for row in rows if row.phase == phase]
        if mine:
            lines.append(f"{phase}: {sum(row.state == 'done' for row in mine)} of {len(mine)} done")
            lines += [row.line() for state in ORDER[1:] for row in mine if row.state == state]
    counts = Counter(row.state for row in rows)
    words = [f"{counts[state]} {state}" for state in ORDER if counts[state]]
    if waiting:
        words.append(f"no point chosen yet for {', '.join(waiting)}")
    return "\n".join([*lines, f"study {study}: {', '.join(words)}"])


def retry(results: Path, study: str) -> int:
    """Run the study's command once more, for all its mixers and seeds; returns its exit code."""
    known = read_json(results / "runs" / study / COMMAND)
    if not known:
        raise UsageError(f"--retry: {results / 'runs' / study / COMMAND} is missing; repeat the command by hand")
    words = [word for word in known["overrides"] if not word.startswith(("mixer=", "seed="))]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    sys.stdout.write(f"{shlex.join(command)}\n")
    sys.stdout.flush()
    return subprocess.run(command, cwd=known["cwd"], check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(f"{__doc__}")
        return 0
    try:
        given = parse(arguments, keys=("study", "paths.results"), flags=("--json", "--retry"))
        if "study" not in given.values:
            raise UsageError("say which study: study=NAME")
        study, results = str(given.values["study"]), Path(str(given.values.get("paths.results", "results")))
        rows, waiting = look(results, study)
        if "--json" in given.flags:
            content: dict[str, Any] = {"study": study, "waiting": waiting, "runs": [vars(row) for row in rows]}
            sys.stdout.write(json.dumps(content, indent=1) + "\n")
        else:
            sys.stdout.write(text(study, rows, waiting) + "\n")
        if "--retry" in given.flags:
            return retry(results, study)
    except (UsageError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0 if all(row.state in ("done", *LIVE) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
