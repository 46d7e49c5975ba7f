"""Weights & Biases from run folders: one run each, rebuilt from metrics.jsonl, then uploaded.

python -m sweeps.sync study=quickstart
python -m sweeps.sync runs=[DIR1,DIR2] entity=team --rebuild

Keys:  study=NAME or runs=[FOLDER,...]     what to send
       project=isomix entity=TEAM          where to; entity: your default
       timeout=600                         seconds that one upload may take: without network it would wait for ever
       paths.results=results
Flags: --rebuild   write the offline runs and upload nothing
       --again     also runs that were sent before and have not changed since

Whatever was killed, requeued or logged under another setting, each run folder gives one W&B run, `<study>-<run_id>`, with
every step once. What `eval.py logger=wandb` left in it is sent as it is, as runs `<study>-eval-<hash>`. Runs that a process is writing to are left out. Uploading needs WANDB_API_KEY or `wandb login`.

Exit code: 0 all sent, 1 something was not, 2 the question makes no sense.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs.folder import RunFolder, read_json, write_atomic
from runs.identity import digest
from runs.wandb_sink import Axes, begin, quiet, summarize, wandb_id
from sweeps.cli import UsageError, as_list, parse
from sweeps.reports.collect import CollectError, study_folder

KEYS = ("study", "runs", "project", "entity", "timeout", "paths.results")
MARK = "synced.json"
"""In a run's wandb folder: what was uploaded, and where to."""


@dataclass(frozen=True)
class Where:
    """The W&B project that runs go to."""

    project: str = "isomix"
    entity: str | None = None


def rebuild(folder: RunFolder, where: Where) -> Path:
    """The offline W&B run of a run folder, made anew from run.json and metrics.jsonl. Returns its folder."""
    quiet()
    shutil.rmtree(folder.path / "wandb", ignore_errors=True)
    record, state = folder.record(), folder.status().get("state")
    run = begin(record, folder.path, mode="offline", project=where.project, entity=where.entity)
    axes = Axes(folder.record)
    for row in folder.rows():
        run.log(axes.add(row), step=row["step"])
    if record.get("metrics"):
        summarize(run, record)
    code = 0 if state == "done" else 1
    run.finish(exit_code=code)
    _end_service(code)
    (made,) = (folder.path / "wandb").glob(f"offline-run-*-{wandb_id(record)}")
    return made


def _end_service(code: int) -> None:
    """W&B's own process writes the file, and `finish` may return before the last of it is there."""
    import wandb

    wandb.teardown(code)


def fingerprint(folder: RunFolder, where: Where) -> str:
    """Changes whenever the upload would."""
    facts = [folder.record().get("metrics"), folder.rows(), folder.status().get("state"), where.project, where.entity]
    return digest(facts)


def upload(offline: Path, timeout: float = 600, where: Where | None = None) -> str | None:
    """Send an offline run, to another project than it names if ``where`` is given; an error in one sentence, or None."""
    to = [] if where is None else ["--project", where.project, *(["--entity", where.entity] if where.entity else [])]
    command = [sys.executable, "-m", "wandb", "sync", str(offline), *to]
    # W&B's own settings may have silenced it: here its words are wanted.
    loud = {key: value for key, value in os.environ.items() if key != "WANDB_SILENT"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=loud
        )
    except subprocess.TimeoutExpired:
        return f"wandb sync did not end within timeout={timeout:g} seconds: no network, or a slow one"
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    failed = done.returncode != 0 or any("error" in line.lower() for line in said)
    return (said[-1] if said else f"wandb sync ended with code {done.returncode}") if failed else None


def sync(
    folders: Sequence[RunFolder], where: Where, *, send: bool = True, again: bool = False, timeout: float = 600
) -> dict[str, str]:
    """What became of each run: ``sent``, ``rebuilt``, ``unchanged``, ``running``, or an error. Evaluations are named by
    their run and their W&B id; they are written when they are made, and only sent here."""
    out: dict[str, str] = {}
    for folder in folders:
        name = folder.path.name
        if send:
            out |= {f"{name} {key}": what for key, what in _evaluations(folder, where, again, timeout).items()}
        if folder.is_locked():
            out[name] = "running"
            continue
        now, mark = fingerprint(folder, where), folder.path / "wandb" / MARK
        if send and not again and read_json(mark).get("fingerprint") == now:
            out[name] = "unchanged"
            continue
        try:
            offline = rebuild(folder, where)
        except Exception as error:  # noqa: BLE001 - W&B raises what it likes; the other runs go on
            out[name] = f"error: {type(error).__name__}: {error}"
            continue
        problem = upload(offline, timeout) if send else None
        if problem:
            out[name] = f"error: {problem}"
            continue
        if send:
            write_atomic(mark, json.dumps({"fingerprint": now, "project": where.project, "entity": where.entity}))
        out[name] = "sent" if send else "rebuilt"
    return out


def _evaluations(folder: RunFolder, where: Where, again: bool, timeout: float) -> dict[str, str]:
    """W&B id -> what became of it, of the offline runs that eval.py left."""
    out: dict[str, str] = {}
    directory = folder.path / "eval" / "wandb"
    for offline in sorted(directory.glob("offline-run-*")):
        name = offline.name.split("-", 3)[3]
        mark = directory / f"{name}.{MARK}"
        to = {
            "folder": offline.name,
            "project": where.project,
            "entity": where.entity,
        }  # another folder: made anew since
        if not again and read_json(mark) == to:
            out[name] = "unchanged"
            continue
        problem = upload(offline, timeout, where)
        out[name] = f"error: {problem}" if problem else "sent"
        if not problem:
            write_atomic(mark, json.dumps(to))
    return out


def find(results: Path, study: str | None, runs: Sequence[str]) -> list[RunFolder]:
    """Raises CollectError where there is no run."""
    paths = [Path(run) for run in runs] or sorted(
        p.parent for p in study_folder(results, str(study)).glob("*/run.json")
    )
    for path in paths:
        if not (path / "run.json").exists():
            raise CollectError(
                f"{path}: not a run folder: no run.json in it. They are results/runs/<study>/<mixer>-<id>"
            )
    if not paths:
        raise CollectError(f"study={study}: no runs under {study_folder(results, str(study))}")
    return [RunFolder(path) for path in paths]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(f"{__doc__}")
        return 0
    try:
        given = parse(arguments, keys=KEYS, flags=("--rebuild", "--again"))
        values: dict[str, Any] = given.values
        runs = as_list(values.get("runs"))
        if bool(runs) == ("study" in values):
            raise UsageError("say what to send: study=NAME or runs=[FOLDER,...], one of the two")
        timeout = values.get("timeout", 600)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
            raise UsageError(f"timeout={timeout}: must be a number of seconds above 0")
        folders = find(Path(str(values.get("paths.results", "results"))), values.get("study"), runs)
    except (UsageError, CollectError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    where = Where(str(values.get("project", "isomix")), values.get("entity"))
    send, again = "--rebuild" not in given.flags, "--again" in given.flags
    found = sync(folders, where, send=send, again=again, timeout=timeout)
    for name, what in found.items():
        sys.stdout.write(f"{what:<10} {name}\n")
    return 1 if any(what.startswith("error") for what in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
